"""Rules of requests that the OpenAPI document cannot express, and the reason for each."""

import re
import time
import urllib.parse

import schemathesis

# Version 1, and version 2 with a time to hold or with slots.
TOKEN = re.compile(r"(1|2-[0-9]{1,8}(?:-[0-9a-f]{1,64})?)\.([1-8][0-9]{15})\.([0-9a-f]{40})")
DAY_MS = 86_400_000
# Longest query, in bytes. The gateway answers 431 without a body to every request whose head is
# longer than 16 KiB. The OpenAPI document does not list this status.
HEAD = 12 * 1024
DECEPTIVE = re.compile(
    "[\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0"
    "\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def without_deceptive(value):
    if isinstance(value, str):
        return DECEPTIVE.sub("", value)
    if isinstance(value, dict):
        return {without_deceptive(key): without_deceptive(inner) for key, inner in value.items()}
    return value


def fit_head(query):
    """Halves the longest text of a query until the query has at most HEAD bytes."""
    while len(urllib.parse.urlencode(query, doseq=True, errors="replace")) > HEAD:
        texts = [(query, key) for key in query if isinstance(query[key], str)]
        for values in (value for value in query.values() if isinstance(value, list)):
            texts += [(values, at) for at, value in enumerate(values) if isinstance(value, str)]
        if not texts:
            return
        place, at = max(texts, key=lambda text: len(text[0][text[1]]))
        place[at] = place[at][: len(place[at]) // 2]


def fit_slots(fields, is_right):
    """Makes `take` possible where a request is meant to be valid."""
    take, slots = fields.get("take"), fields.get("slots")
    # Numbers of a query may be texts.
    if is_right and take is not None and slots is None:
        del fields["take"]
    elif is_right and is_number(take) and is_number(slots) and float(take) > float(slots):
        fields["take"] = slots


def is_number(value):
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


@schemathesis.hook
def before_call(context, case, kwargs):
    # A change may make a wrong request valid, and a valid request needs more changes. The tool
    # itself finds out, after each change, whether a request is valid.
    for _ in range(2):
        fit_request(case)


def fit_request(case):
    """Applies each rule once."""
    # The gateway treats a body of `null` like no body, because some generated clients cannot omit it.
    # The document does not allow `null`, because the generated types would get more complicated. So
    # the tool expects a refusal. A list is wrong for the gateway and for the document.
    if case.body is None:
        case.body = []
    body = case.body if isinstance(case.body, dict) else {}
    # A request that waits a day for a held lock is valid. But its answer would take a day.
    if isinstance(body.get("wait_ms"), (int, float)) and 50 < body["wait_ms"] <= DAY_MS:
        body["wait_ms"] = 50
    # A lock with a short TTL may expire before the next request. That request would rightly get
    # "not found", and the tool would report an error.
    if isinstance(body.get("ttl_ms"), (int, float)) and 10 <= body["ttl_ms"] < 60_000:
        body["ttl_ms"] += 60_000
    # Stored texts may not contain line separators or direction marks. The pattern syntax that all
    # languages share cannot express this.
    for field in ("owner", "metadata"):
        if field in body:
            body[field] = without_deceptive(body[field])
    # A request takes at most as many slots as the lock has.
    is_right = case.meta is not None and case.meta.generation.mode.is_positive
    fit_slots(body, is_right)
    # A deferred request for several locks has no slots and no queue mode.
    if is_right and isinstance(body.get("names"), list) and len(body["names"]) > 1:
        for field in ("slots", "take", "queue"):
            body.pop(field, None)
    # Callbacks go only to origins that the operator allows. The document cannot name them.
    if is_right:
        body.pop("callback_url", None)
    # A cursor comes from the previous page of the same listing, so an invented one is refused.
    # Without a cursor, the first page is listed.
    if case.query and case.query.get("cursor"):
        case.query["cursor"] = ""
    # The second of a token's three parts is a time. If the time is in the future, nodes cannot decide
    # whether the lock was released (503, outcome_unknown). A time one second in the past is safe on
    # every clock.
    token = (case.headers or {}).get("Lock-Token")
    parts = TOKEN.fullmatch(token) if isinstance(token, str) else None
    if parts and int(parts[2]) > (time.time() - 1) * 1_000_000:
        case.headers["Lock-Token"] = f"{parts[1]}.10{parts[2][2:]}.{parts[3]}"
    if case.query:
        fit_head(case.query)
    # A release takes a token, a key or `force`, and OpenAPI cannot express this choice. The tool
    # may put an invalid token beside the parameter that it tests. So a request that is meant to be
    # valid gets a valid token here. The gateway ignores a key beside a token, so a key is sent
    # alone.
    forced = str((case.query or {}).get("force")).lower() == "true"
    is_token = parts is not None
    if case.method.upper() == "DELETE" and forced and is_right and case.headers:
        case.headers.pop("Lock-Token", None)
    # With `force`, the query names a slot. With a key, it has the numbers of the POST. This is also
    # done where a request is wrong: if only its token is wrong or missing, it becomes valid below.
    has_key = "Idempotency-Key" in (case.headers or {})
    if case.method.upper() == "DELETE" and case.query:
        for field in ("slots", "take") if forced else ("slot",):
            case.query.pop(field, None)
        fit_slots(case.query, True)
    if case.method.upper() == "DELETE" and not forced and has_key:
        case.headers.pop("Lock-Token", None)
    elif case.method.upper() == "DELETE" and not forced and (not token or is_right and not is_token):
        if case.headers is None:
            case.headers = {}
        case.headers["Lock-Token"] = "1.1000000000000000." + "1" * 40
