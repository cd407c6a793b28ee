#!/usr/bin/env python3
"""A client that keeps one connection and survives hibernations of its sandbox.

usage: client.py HOST PORT PIDFILE

It connects anew when the connection breaks and when the hook 30-reconnect, or
anybody else, sends SIGUSR1. What it receives goes to standard output.
"""
import os, signal, socket, sys, time

host, port, pidfile = sys.argv[1], int(sys.argv[2]), sys.argv[3]


class Again(Exception):
    pass


def again(signum, frame):
    raise Again


# While there is no connection, a signal asks for nothing that is not done anyhow.
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
os.makedirs(os.path.dirname(pidfile), exist_ok=True)
with open(pidfile, "w") as f:
    f.write(str(os.getpid()))

while True:
    try:
        # No source address or port is asked for: the old one may still be held.
        with socket.create_connection((host, port), timeout=10) as s:
            s.settimeout(None)
            signal.signal(signal.SIGUSR1, again)
            while data := s.recv(4096):
                sys.stdout.write(data.decode(errors="replace"))
                sys.stdout.flush()
    except (OSError, Again):
        pass
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    time.sleep(0.2)
