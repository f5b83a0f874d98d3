"""`meshlm keys FILE`: make the keys that links between nodes need."""

import argparse
import json
import os

import zmq

from meshlm.supervisor.errors import StartError, UsageError


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "keys",
        help="make the keys for a mesh of several nodes",
        description="Make a new pair of keys; every node of the mesh needs a copy of the file (--key-file).",
    )
    parser.add_argument("file", help="where to write it, mode 0600; must not exist")


def run(arguments: argparse.Namespace) -> int:
    public, secret = zmq.curve_keypair()
    content = {"public_key": public.decode(), "secret_key": secret.decode()}
    try:
        fd = os.open(arguments.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{arguments.file} exists and is not overwritten") from None
    except OSError as error:
        raise StartError(f"{arguments.file}: {error.strerror}") from None
    with os.fdopen(fd, "w", encoding="ascii") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
    print(f"{arguments.file}: copy it to every node, readable by its user alone; public key {public.decode()}")
    return 0
