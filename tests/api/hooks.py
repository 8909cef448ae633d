"""What cannot be said in the OpenAPI document, and why."""

import re
import time

import schemathesis

TOKEN = re.compile(r"1\.[1-8][0-9]{15}\.[0-9a-f]{40}")
DAY_MS = 86_400_000
DECEPTIVE = re.compile("[\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def without_deceptive(value):
    if isinstance(value, str):
        return DECEPTIVE.sub("", value)
    if isinstance(value, dict):
        return {without_deceptive(key): without_deceptive(inner) for key, inner in value.items()}
    return value


@schemathesis.hook
def before_call(context, case, kwargs):
    # Who asks to wait for a day for a lock that is held is right, and is answered after a day.
    body = case.body if isinstance(case.body, dict) else {}
    if isinstance(body.get("wait_ms"), (int, float)) and 50 < body["wait_ms"] <= DAY_MS:
        body["wait_ms"] = 50
    # A lock that was asked for with a short life may have run out before the next request: not found, and rightly.
    if isinstance(body.get("ttl_ms"), (int, float)) and 10 <= body["ttl_ms"] < 10_000:
        body["ttl_ms"] += 10_000
    # Separators of lines and marks of direction are refused in what is stored: patterns of all languages have no common way to
    # write them.
    for field in ("owner", "metadata"):
        if field in body:
            body[field] = without_deceptive(body[field])
    # A cursor is what a page before has answered, to the same question, and nothing that anybody can make up. Without one it is
    # the first page.
    if case.query and case.query.get("cursor"):
        case.query["cursor"] = ""
    # The second part of a token is a time, and no token is of the future: the nodes cannot say what became of its lock
    # (503, outcome_unknown). A second earlier keeps clear of every clock.
    token = (case.headers or {}).get("Lock-Token")
    if isinstance(token, str) and TOKEN.fullmatch(token) and int(token[2:18]) > (time.time() - 1) * 1_000_000:
        case.headers["Lock-Token"] = token[:2] + "10" + token[4:]
    # A release takes a token, a key or force, which the document has no way to say. What is to be right is given a right one also
    # where the tool has put a wrong one beside the query that it is about. A key beside a token is not used: it goes alone.
    forced = str((case.query or {}).get("force")).lower() == "true"
    is_right = case.meta is not None and case.meta.generation.mode.is_positive
    is_token = isinstance(token, str) and TOKEN.fullmatch(token)
    if case.method.upper() == "DELETE" and forced and is_right and case.headers:
        case.headers.pop("Lock-Token", None)
    has_key = "Idempotency-Key" in (case.headers or {})
    if case.method.upper() == "DELETE" and not forced and has_key:
        case.headers.pop("Lock-Token", None)
    elif case.method.upper() == "DELETE" and not forced and (not token or is_right and not is_token):
        if case.headers is None:
            case.headers = {}
        case.headers["Lock-Token"] = "1.1000000000000000." + "1" * 40
