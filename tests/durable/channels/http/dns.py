"""Lookups of names, for the tests of targets."""

import asyncio
import socket

PUBLIC = "93.184.215.14"
UNANSWERED = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def answering(*answers, log=None):
    """A lookup that gives one answer after the other, the last one again and again."""
    left = list(answers)

    async def lookup(host, port):
        if log is not None:
            log.append(host)
        await asyncio.sleep(0)
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return [entry(one, port) for one in answer]

    return lookup


def entry(address, port=80):
    """One of getaddrinfo's tuples."""
    if ":" in address:
        address, _, scope = address.partition("%")
        sockaddr = (address, port, 0, int(scope or 0))
        return socket.AF_INET6, socket.SOCK_STREAM, 6, "", sockaddr
    return socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)
