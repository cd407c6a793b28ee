# Holds SIZE MiB of computed state and a counter; serves both over HTTP at PORT.
# KIND is "random" (cannot be compressed) or "records" (lines of JSON, as programs hold).
import hashlib, http.server, json, os, random, struct, sys, threading, time, zlib

size, port = int(sys.argv[1]) << 20, int(sys.argv[2])
kind = sys.argv[3] if len(sys.argv) > 3 else "random"


def records():
    rng, block = random.Random(size), bytearray()
    while len(block) < min(size, 4 << 20):
        block += b"".join(
            b'{"id": %d, "name": "user %d", "email": "u%d@example.org", "score": %.6f, "active": %s, "tags": ["%x", "%x"]}\n'
            % (i, i * 7, i * 7, rng.random() * 100, b"true" if i & 3 else b"false", rng.getrandbits(16), rng.getrandbits(16))
            for i in range(len(block), len(block) + 1024)
        )
    whole = bytearray(size)
    for at in range(0, size, len(block)):
        part = block[: size - at]
        whole[at : at + len(part)] = part
    for at in range(0, size, 4096):  # no two pages are equal
        struct.pack_into("<Q", whole, at, at)
    return whole


state = records() if kind == "records" else hashlib.shake_128(b"hibernacle").digest(size)
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
        if self.path.startswith("/touch/"):  # /touch/SEED/COUNT: reads pages all over the state
            seed, n = map(int, self.path.split("/")[2:4])
            rng = random.Random(seed)
            answer["touched"] = sum(state[rng.randrange(size)] for _ in range(n))
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


threading.Thread(target=count, daemon=True).start()
http.server.ThreadingHTTPServer(("0.0.0.0", port), Handler).serve_forever()
