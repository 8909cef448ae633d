"""Writes what a library delivers of a stream, until the lock was released: reader.py LIBRARY URL"""

import json
import sys

library, url = sys.argv[1:]
headers = {"Accept": "text/event-stream"}


def delivered():
    if library == "httpx-sse":
        import httpx
        from httpx_sse import connect_sse

        with httpx.Client(timeout=None) as client, connect_sse(client, "GET", url) as source:
            yield from source.iter_sse()
    elif library == "sseclient-py":
        import requests
        import sseclient

        yield from sseclient.SSEClient(requests.get(url, stream=True, headers=headers)).events()
    else:
        import sseclient

        yield from sseclient.SSEClient(url)


for event in delivered():
    print(json.dumps([event.event, event.data]), flush=True)
    if event.event == "released":
        break
