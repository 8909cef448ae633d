"""Rules of requests that the OpenAPI document cannot express, and the reason for each."""

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
    # A request that waits a day for a held lock is valid, and its answer takes a day.
    body = case.body if isinstance(case.body, dict) else {}
    if isinstance(body.get("wait_ms"), (int, float)) and 50 < body["wait_ms"] <= DAY_MS:
        body["wait_ms"] = 50
    # A lock with a short TTL may expire before the next request, which then correctly gets "not
    # found".
    if isinstance(body.get("ttl_ms"), (int, float)) and 10 <= body["ttl_ms"] < 10_000:
        body["ttl_ms"] += 10_000
    # Stored texts may hold no line separators and no direction marks. No pattern syntax that all
    # languages share can express this.
    for field in ("owner", "metadata"):
        if field in body:
            body[field] = without_deceptive(body[field])
    # A cursor comes from the previous page of the same listing, and nobody can invent one. Without
    # a cursor the first page is listed.
    if case.query and case.query.get("cursor"):
        case.query["cursor"] = ""
    # The second part of a token is a time. For a token from the future the nodes cannot decide
    # whether the lock was released (503, outcome_unknown). One second in the past is safe on every
    # clock.
    token = (case.headers or {}).get("Lock-Token")
    if isinstance(token, str) and TOKEN.fullmatch(token) and int(token[2:18]) > (time.time() - 1) * 1_000_000:
        case.headers["Lock-Token"] = token[:2] + "10" + token[4:]
    # A release takes a token, a key or force, and OpenAPI cannot express this choice. A request
    # meant to be valid gets a valid token, even if the tool put an invalid one beside the parameter
    # under test. A key beside a token is ignored, so the key is sent alone.
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
