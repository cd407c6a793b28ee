# Holds SIZE MiB of computed state and a counter; serves both over HTTP.
import hashlib, http.server, json, os, sys, threading, time, zlib

size, port = int(sys.argv[1]), int(sys.argv[2])
state = hashlib.shake_128(b"hibernacle").digest(size << 20)
counter, longest, last = 0, 0.0, time.monotonic()


def count():
    global counter, longest, last
    while True:
        time.sleep(0.05)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        counter += 1


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        answer = {"pid": os.getpid(), "counter": counter, "time": time.time(), "longest_gap": longest}
        if self.path == "/sum":
            answer["sum"] = zlib.crc32(state)
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


threading.Thread(target=count, daemon=True).start()
http.server.ThreadingHTTPServer(("0.0.0.0", port), Handler).serve_forever()
