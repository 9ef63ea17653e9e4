#!/usr/bin/env python3
"""Stands for valkey-cli in the stand-in for the Redis image: sends one command, prints the answer.

`-e` makes an error of the server an error of this command, as with the real one.
"""

import socket
import sys

words = [word for word in sys.argv[1:] if word != "-e"]
with socket.create_connection(("127.0.0.1", 6379), 3) as connection:
    connection.sendall((" ".join(words) + "\r\n").encode())
    answer = connection.recv(4096).decode(errors="replace").strip()
print(answer)
sys.exit(answer.startswith("-") and "-e" in sys.argv)
