//! Errors of requests: a table of bad requests, each with the status, the code, and the words that
//! help to correct it. The gateway never changes a bad value into an allowed one, and never
//! guesses.

use bytes::Bytes;
use http::Method;
use serde_json::json;

use crate::support::client::{Answer, Call, lock_path};
use crate::support::gateway::{Gateway, Launch};

/// A well-formed token that belongs to no lock of this test.
const FOREIGN: &str = "1.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b";

#[track_caller]
fn assert_bad(what: &str, answer: &Answer, status: u16, code: &str, words: &[&str]) {
    assert_eq!(answer.status, status, "{what}: {answer:?}");
    let problem = answer.problem(status, code);
    let detail = problem["detail"].as_str().unwrap();
    for word in words {
        assert!(detail.contains(word), "{what}: {detail:?} lacks {word:?}");
    }
}

async fn assert_all_bad(cases: Vec<(&str, Call, u16, &str, &[&str])>) {
    for (what, call, status, code, words) in cases {
        assert_bad(what, &call.send().await, status, code, words);
    }
}

/// For each call that takes a body: this text as its body.
fn with_body(gateway: &Gateway, text: impl Into<Bytes>) -> Call {
    gateway.call(Method::POST, "/locks/job").header("content-type", "application/json").body(text)
}

#[tokio::test]
async fn bad_lock_names_are_refused_with_the_reason() {
    let gateway = Launch::embedded().start().await;
    let allowed = "1 to 255 bytes of [A-Za-z0-9._:@/+~-]";
    let too_long = format!("/locks/{}", "n".repeat(256));
    let cases = [
        ("empty", "/locks/", 400, "invalid_name", ["the name is empty", allowed]),
        ("256 bytes", too_long.as_str(), 400, "invalid_name", ["the name has 256 bytes", allowed]),
        ("a line feed", "/locks/a%0Ab", 400, "invalid_name", ["'\\n' at byte 1", allowed]),
        ("DEL", "/locks/%7f", 400, "invalid_name", ["'\\u{7f}' at byte 0", allowed]),
        ("NUL", "/locks/job%00", 400, "invalid_name", ["'\\0' at byte 3", allowed]),
        ("a space", "/locks/a%20b", 400, "invalid_name", ["' ' at byte 1", allowed]),
        ("a brace", "/locks/%7Bjob%7D", 400, "invalid_name", ["'{' at byte 0", allowed]),
        (
            "a letter beyond ASCII",
            "/locks/gr%C3%B6%C3%9Fe",
            400,
            "invalid_name",
            ["'ö' at byte 2", allowed],
        ),
        ("a percent sign", "/locks/100%25", 400, "invalid_name", ["'%' at byte 3", allowed]),
        (
            "a percent sign that encodes nothing",
            "/locks/100%",
            400,
            "invalid_name",
            ["'%' at byte 3", allowed],
        ),
        ("no UTF-8", "/locks/%ff%fe", 400, "invalid_name", ["not UTF-8", "percent-decoding"]),
        ("a dot", "/locks/.", 400, "invalid_name", ["part \".\"", "may be empty"]),
        (
            "two dots in the middle",
            "/locks/a%2F..%2Fb",
            400,
            "invalid_name",
            ["part \"..\"", "may be empty"],
        ),
        ("two slashes", "/locks/a%2F%2Fb", 400, "invalid_name", ["part \"\"", "may be empty"]),
        ("a slash at the end", "/locks/a%2F", 400, "invalid_name", ["part \"\"", "may be empty"]),
    ];
    for (what, path, status, code, words) in cases {
        for method in [Method::POST, Method::PATCH, Method::DELETE, Method::GET] {
            let call = gateway
                .call(method.clone(), path)
                .header("lock-token", FOREIGN)
                .json(&json!({ "ttl_ms": 1_000 }));
            assert_bad(&format!("{method}, {what}"), &call.send().await, status, code, &words);
        }
    }
}

#[tokio::test]
async fn bad_ttls_are_quoted_with_the_allowed_range() {
    let gateway = Launch::embedded().flag("--max-ttl", "2m").start().await;
    let lease = gateway.acquire("held").await;
    for bad in [
        "0",
        "9",
        "-1",
        "-30000",
        "120001",
        "9223372036854775808",
        "1.5",
        "30000.5",
        "\"30s\"",
        "null",
        "[5000]",
        "true",
    ] {
        let body = format!("{{\"ttl_ms\":{bad}}}");
        let quoted = format!("ttl_ms is {bad}");
        let allowed = "allowed are whole milliseconds from 10 to 120000";
        let post = with_body(&gateway, body.clone()).send().await;
        assert_bad(bad, &post, 400, "invalid_ttl", &[&quoted, allowed]);
        let patch = gateway.call(Method::PATCH, "/locks/held").header("lock-token", &lease.token);
        let patch = patch.header("content-type", "application/json").body(body).send().await;
        assert_bad(bad, &patch, 400, "invalid_ttl", &[&quoted, allowed]);
    }
    let ways_out = "extend the lock while you work, or have the operator raise the limit";
    let too_long = gateway.post("longer", json!({ "ttl_ms": 120_001 })).await;
    assert_bad(
        "a longer TTL",
        &too_long,
        400,
        "invalid_ttl",
        &["ttl_ms is 120001", "to 120000;", ways_out],
    );
    let too_short = gateway.post("shorter", json!({ "ttl_ms": 9 })).await.json();
    assert!(!too_short["detail"].as_str().unwrap().contains("operator"), "{too_short}");
    let long = format!("{{\"ttl_ms\":\"{}\"}}", "9".repeat(1_000));
    let answer = with_body(&gateway, long).send().await;
    assert_bad("a long text", &answer, 400, "invalid_ttl", &["…", "10 to 120000"]);
    assert!(answer.json()["detail"].as_str().unwrap().len() < 200, "{answer:?}");
    assert_eq!(
        gateway.post("longest", json!({ "ttl_ms": 120_000 })).await.status,
        201,
        "the limit itself is allowed"
    );
    let whole = with_body(&gateway, "{\"ttl_ms\":60000.0,\"wait_ms\":0.0}").send().await;
    assert_eq!(
        (whole.status, &whole.json()["ttl_ms"]),
        (201, &json!(60_000)),
        "an integer in the sense of JSON Schema"
    );
    let shortest = gateway.post("shortest", json!({ "ttl_ms": 10 })).await;
    assert_ne!(
        shortest.status, 400,
        "the shortest TTL is valid, though a busy machine may leave nothing of it: {shortest:?}"
    );
}

#[tokio::test]
async fn bad_bodies_are_refused_with_their_defect() {
    let gateway = Launch::embedded().start().await;
    let deep = format!("{{\"metadata\":{}{}}}", "[".repeat(7_000), "]".repeat(7_000));
    let long_owner = format!("{{\"owner\":\"{}\"}}", "o".repeat(256));
    let big_value = format!("{{\"metadata\":{{\"k\":\"{}\"}}}}", "v".repeat(1_024));
    let escapes = format!("{{\"metadata\":{{\"k\":\"{}\"}}}}", "\\u0001".repeat(1_023));
    let bodies: [(&str, &[u8], &[&str]); 19] = [
        ("a misspelt field", br#"{"ttl":5000}"#, &["unknown field `ttl`; allowed are", "`ttl_ms`"]),
        ("an unknown field", br#"{"ttl_ms":5000,"force":true}"#, &["unknown field `force`"]),
        ("a field twice", br#"{"ttl_ms":5000,"ttl_ms":6000}"#, &["duplicate field `ttl_ms`"]),
        (
            "broken off",
            br#"{"ttl_ms":50"#,
            &["the body is not JSON: it ends too early at line 1 column 12"],
        ),
        (
            "something after the end",
            br#"{"ttl_ms":5000} x"#,
            &["the body is not JSON: trailing characters", "column 17"],
        ),
        ("no JSON", b"ttl_ms=5000", &["not a JSON object", "must begin with {"]),
        ("not a number", br#"{"ttl_ms":NaN}"#, &["column 11"]),
        ("no UTF-8", b"{\"owner\":\"\xff\"}", &["unicode", "line 1"]),
        ("an array in the order of the fields", b"[5000]", &["not a JSON object"]),
        ("a string", br#""5000""#, &["not a JSON object"]),
        ("deep nesting", deep.as_bytes(), &["recursion limit", "line 1"]),
        (
            "an owner that is too long",
            long_owner.as_bytes(),
            &["owner has 256 characters", "at most 255"],
        ),
        ("an owner with a line feed", br#"{"owner":"a\nb"}"#, &["owner has a control character"]),
        ("an owner that is a number", br#"{"owner":7}"#, &["owner is 7; owner must be a string"]),
        ("an owner that is null", br#"{"owner":null}"#, &["owner must be a string"]),
        (
            "nested metadata",
            br#"{"metadata":{"a":{"b":"c"}}}"#,
            &["metadata", "values are strings"],
        ),
        ("metadata that is a list", br#"{"metadata":["a"]}"#, &["metadata must be an object"]),
        (
            "too much metadata",
            big_value.as_bytes(),
            &["metadata has 1025 bytes", "allowed are 1024"],
        ),
        (
            "too much metadata when escaped",
            escapes.as_bytes(),
            &["more than", "bytes when escaped"],
        ),
    ];
    for (what, body, words) in bodies {
        let answer = with_body(&gateway, body.to_vec()).send().await;
        assert_bad(what, &answer, 400, "invalid_body", words);
    }
    // These characters can make a text look like another one.
    let invisible = "\u{ad}\u{115f}\u{200b}\u{2060}\u{3164}\u{feff}\u{e0041}";
    let others = "\u{2028}\u{2029}\u{61c}\u{200e}\u{200f}\u{202a}\u{202e}\u{2066}\u{2069}";
    for c in others.chars().chain(invisible.chars()) {
        let text = format!("a{c}b");
        let asked = [
            json!({ "owner": text }),
            json!({ "metadata": { "k": text } }),
            json!({ "metadata": { &text: "v" } }),
        ];
        for (body, field) in asked.into_iter().zip(["owner", "metadata", "metadata"]) {
            let problem = gateway.post("job", body).await.problem(400, "invalid_body");
            let detail = problem["detail"].as_str().unwrap();
            assert!(
                detail.contains(field)
                    && detail.contains("bidirectional control")
                    && !detail.contains(c),
                "{detail}"
            );
        }
    }
    assert_eq!(gateway.inspect("job").await["state"], "free", "one of them got the lock");
    // Persian and emoji need these.
    let joined = json!({ "owner": "می\u{200c}خواهم 👩\u{200d}🚒 ❤\u{fe0f}" });
    assert_eq!(gateway.post("joined", joined).await.status, 201);
    let most = json!({ "owner": "é".repeat(255), "metadata": { "k": "v".repeat(1_023) } });
    assert_eq!(gateway.post("most", most).await.status, 201);
}

#[tokio::test]
async fn a_body_must_say_that_it_is_json() {
    let gateway = Launch::embedded().start().await;
    let body = r#"{"ttl_ms":5000}"#;
    let missing = gateway.call(Method::POST, "/locks/job").body(body).send().await;
    assert_bad(
        "missing",
        &missing,
        415,
        "unsupported_media_type",
        &["content type is missing", "application/json"],
    );
    for other in
        ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", "text/json"]
    {
        let answer = gateway
            .call(Method::POST, "/locks/job")
            .header("content-type", other)
            .body(body)
            .send()
            .await;
        assert_bad(other, &answer, 415, "unsupported_media_type", &[other, "application/json"]);
    }
    for (name, value, status, code) in [
        ("content-encoding", "gzip", 415, "unsupported_media_type"),
        ("content-type", "application/json", 415, "unsupported_media_type"),
        ("expect", "a-miracle", 400, "invalid_parameter"),
    ] {
        let call = gateway.call(Method::POST, "/locks/job");
        let call = call.header("content-type", "application/json").header(name, value);
        call.body(body).send().await.problem(status, code);
    }
    let mut raw = gateway.raw().await;
    let head = "POST /locks/job HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
    raw.write(head).await;
    raw.answer().await.problem(400, "invalid_parameter");
    for (n, good) in ["application/json", "Application/JSON; charset=utf-8"].into_iter().enumerate()
    {
        let name = lock_path(&format!("job-{n}"));
        let answer =
            gateway.call(Method::POST, name).header("content-type", good).body(body).send().await;
        assert_eq!(answer.status, 201, "{good}: {answer:?}");
    }
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_413_however_it_is_sent() {
    let gateway = Launch::embedded().start().await;
    let two_mebibytes = vec![b' '; 2 << 20];
    let limit = ["larger than 16384 bytes"];

    let mut raw = gateway.raw().await;
    raw.announce("POST", "job", "", two_mebibytes.len()).await;
    // The gateway may stop reading at any time, so the write may fail. The answer must still
    // arrive.
    let _ = raw.try_write(&two_mebibytes).await;
    assert_bad("by content-length", &raw.answer().await, 413, "body_too_large", &limit);

    let mut raw = gateway.raw().await;
    raw.write(
        "POST /locks/job HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n",
    )
    .await;
    for chunk in two_mebibytes.chunks(16 * 1024) {
        let mut framed = format!("{:x}\r\n", chunk.len()).into_bytes();
        framed.extend_from_slice(chunk);
        framed.extend_from_slice(b"\r\n");
        if raw.try_write(framed).await.is_err() {
            break;
        }
    }
    assert_bad("in chunks", &raw.answer().await, 413, "body_too_large", &limit);

    let exactly = format!("{{{}}}", " ".repeat(16_382));
    assert_eq!(
        with_body(&gateway, exactly).send().await.status,
        201,
        "the limit itself is allowed"
    );
    let one_more = format!("{{{}}}", " ".repeat(16_383));
    assert_bad(
        "one more",
        &with_body(&gateway, one_more).send().await,
        413,
        "body_too_large",
        &limit,
    );
}

#[tokio::test]
async fn a_lock_token_must_be_present_once_and_valid() {
    let gateway = Launch::embedded().start().await;
    let lease = gateway.acquire("job").await;
    let other = gateway.acquire("another").await;
    let bad = [
        ("empty", String::new()),
        ("no token", "secret".into()),
        ("of another version", lease.token.replacen('1', "2", 1)),
        ("cut short", lease.token[..lease.token.len() - 1].into()),
        ("with more at the end", format!("{}0", lease.token)),
        ("with a fourth part", format!("{}.0", lease.token)),
        ("with another letter", lease.token.replace(lease.owner(), &"G".repeat(40))),
        ("with one angle bracket", format!("<{}", lease.token)),
        ("two in one header", format!("{0}, {0}", lease.token)),
        ("beyond ASCII", "1.ä".into()),
    ];
    for method in [Method::PATCH, Method::DELETE] {
        let call = || gateway.call(method.clone(), "/locks/job").json(&json!({ "ttl_ms": 5_000 }));
        assert_bad(
            "missing",
            &call().send().await,
            400,
            "missing_token",
            &["Lock-Token header is missing"],
        );
        for (what, token) in &bad {
            let answer = call().header("lock-token", token).send().await;
            assert_bad(
                &format!("{method}, {what}"),
                &answer,
                400,
                "invalid_token",
                &["Lock-Token", "between < and >"],
            );
        }
        let twice = call()
            .header("lock-token", &lease.token)
            .header("lock-token", &lease.token)
            .send()
            .await;
        assert_bad("twice", &twice, 400, "invalid_token", &["Lock-Token"]);
        let foreign = call().header("lock-token", &other.token).send().await;
        let problem = foreign.problem(409, "not_holder");
        assert!(
            problem["detail"]
                .as_str()
                .unwrap()
                .contains("this token or Idempotency-Key does not hold the lock"),
            "{problem:#}"
        );
    }
    let by_key = gateway.call(Method::DELETE, lock_path("job"));
    let by_key = by_key.header("idempotency-key", "of-another-request").send().await;
    let problem = by_key.problem(409, "not_holder");
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("this token or Idempotency-Key does not hold"), "{problem:#}");
    assert_eq!(
        gateway.delete("job", &lease.token).await.status,
        204,
        "no refused request changed anything"
    );
}

#[tokio::test]
async fn invalid_or_too_long_waiting_times_are_refused() {
    let gateway = Launch::embedded().flag("--max-wait", "20s").start().await;
    let words: &[&str] = &["allowed are whole milliseconds from 0 to 20000"];
    for (what, body) in [
        ("wait_ms is 20001", r#"{"wait_ms":20001}"#),
        ("wait_ms is \"5s\"", r#"{"wait_ms":"5s"}"#),
        ("wait_ms is null", r#"{"wait_ms":null}"#),
        ("wait_ms is -1", r#"{"wait_ms":-1}"#),
        ("wait_ms is 0.5", r#"{"wait_ms":0.5}"#),
    ] {
        let answer = with_body(&gateway, body).send().await;
        assert_bad(what, &answer, 400, "invalid_wait", words);
        assert!(answer.json()["detail"].as_str().unwrap().contains(what), "{answer:?}");
    }
    let long = format!("{{\"wait_ms\":\"{}\"}}", "5".repeat(10_000));
    let answer = with_body(&gateway, long).send().await;
    assert_bad("a long text", &answer, 400, "invalid_wait", words);
    assert!(answer.json()["detail"].as_str().unwrap().len() < 300, "the whole text is quoted");

    let preferring = |value: &str| gateway.call(Method::POST, "/locks/job").header("prefer", value);
    for value in ["wait=21", "respond-async, wait=21", "wait=\"21\"; foo=bar", "WAIT = 21"] {
        let words = &["Prefer: wait is 21", "allowed are 0 to 20 whole seconds"];
        assert_bad(value, &preferring(value).send().await, 400, "invalid_wait", words);
    }
    for value in ["wait=soon", "wait=-1", "wait=1.5"] {
        assert_bad(
            value,
            &preferring(value).send().await,
            400,
            "invalid_wait",
            &["Prefer", "allowed are 0 to 20 whole seconds"],
        );
    }
    assert_eq!(gateway.inspect("job").await["state"], "free");
    let body_wins =
        preferring("wait=21").json(&json!({ "wait_ms": 0, "ttl_ms": 60_000 })).send().await;
    assert_eq!(
        (body_wins.status, body_wins.header("preference-applied")),
        (201, ""),
        "nothing of the preference was applied: {body_wins:?}"
    );
}

#[tokio::test]
async fn bad_idempotency_keys_are_refused_and_not_repeated() {
    let gateway = Launch::embedded().start().await;
    let allowed = "16 to 255 visible ASCII characters";
    for key in
        ["", "fifteen-charact", &"k".repeat(256), "sixteen with spaces", "sixteen-chärs-and-more"]
    {
        let answer =
            gateway.call(Method::POST, "/locks/job").header("idempotency-key", key).send().await;
        assert_bad(key, &answer, 400, "invalid_parameter", &["Idempotency-Key", allowed]);
        assert!(key.is_empty() || !answer.text().contains(key), "{answer:?}");
    }
    for path in ["/locks/job", "/locks/job?force=true"] {
        let answer =
            gateway.call(Method::DELETE, path).header("idempotency-key", "too short").send().await;
        assert_bad(path, &answer, 400, "invalid_parameter", &["Idempotency-Key", allowed]);
    }
    let twice =
        gateway.call(Method::POST, "/locks/job").header("idempotency-key", "sixteen-characters-1");
    let twice = twice.header("idempotency-key", "sixteen-characters-2").send().await;
    assert_bad("two keys", &twice, 400, "invalid_parameter", &["Idempotency-Key"]);
    for (name, key) in [("shortest", "k".repeat(16)), ("longest", "k".repeat(255))] {
        let answer =
            gateway.call(Method::POST, lock_path(name)).header("idempotency-key", key).send().await;
        assert_eq!(answer.status, 201, "{name}: {answer:?}");
    }
}

#[tokio::test]
async fn bad_query_parameters_of_a_listing_are_named() {
    let gateway = Launch::embedded().start().await;
    let get = |query: &str| gateway.call(Method::GET, format!("/locks?{query}"));
    let long = format!("prefix={}", "p".repeat(256));
    assert_all_bad(vec![
        ("no limit", get("limit=0"), 400, "invalid_parameter", &["limit is \"0\"", "1 to 1000"]),
        (
            "a large limit",
            get("limit=1001"),
            400,
            "invalid_parameter",
            &["limit is \"1001\"", "1 to 1000"],
        ),
        ("a negative limit", get("limit=-1"), 400, "invalid_parameter", &["limit is \"-1\""]),
        ("a limit in words", get("limit=ten"), 400, "invalid_parameter", &["limit is \"ten\""]),
        ("no cursor", get("cursor=next"), 400, "invalid_parameter", &["cursor", "next_cursor"]),
        ("a cursor beyond all nodes", get("cursor=99-0-"), 400, "invalid_parameter", &["cursor"]),
        (
            "a bad prefix",
            get("prefix=a%20b"),
            400,
            "invalid_parameter",
            &["prefix", "' ' at byte 1"],
        ),
        ("a pattern", get("prefix=a*"), 400, "invalid_parameter", &["prefix", "'*' at byte 1"]),
        ("a long prefix", get(&long), 400, "invalid_parameter", &["prefix", "256 bytes"]),
        (
            "an unknown parameter",
            get("offset=5"),
            400,
            "invalid_parameter",
            &["\"offset\"", "prefix, limit"],
        ),
        (
            "a parameter twice",
            get("limit=5&limit=6"),
            400,
            "invalid_parameter",
            &["limit is given twice"],
        ),
        // If the gateway ignored this field, the client would get the default TTL without noticing.
        (
            "a TTL in the query",
            gateway.call(Method::POST, "/locks/job?ttl_ms=5"),
            400,
            "invalid_parameter",
            &["body"],
        ),
    ])
    .await;
}

#[tokio::test]
async fn a_secret_in_the_wrong_place_is_not_quoted() {
    let gateway = Launch::embedded().start().await;
    let token = gateway.acquire("job").await.token;
    let encoded: String = token.bytes().map(|byte| format!("%{byte:02x}")).collect();
    let listing = gateway.call(Method::GET, format!("/locks?limit={encoded}"));
    let forced = gateway.call(Method::DELETE, format!("/locks/job?force={token}"));
    let labelled = gateway.call(Method::POST, "/locks/other").json(&json!({ "owner": [token] }));
    for call in [listing, forced, labelled] {
        let answer = call.send().await;
        assert_eq!(answer.status, 400, "{answer:?}");
        assert!(!answer.text().contains(&token[4..24]), "{answer:?}");
    }
}

#[tokio::test]
async fn unknown_paths_and_methods_get_the_existing_ones() {
    let gateway = Launch::embedded().start().await;
    let call = |method: &str, path: &str| {
        gateway.call(Method::from_bytes(method.as_bytes()).unwrap(), path)
    };
    assert_all_bad(vec![
        ("another path", call("POST", "/lock/job"), 404, "not_found", &["/openapi.json"]),
        ("a file that is no asset", call("GET", "/docs/secret.txt"), 404, "not_found", &["/docs"]),
    ])
    .await;
    for (method, path, allowed) in [
        ("PUT", "/locks/job", "POST,PATCH,DELETE,GET,HEAD"),
        ("OPTIONS", "/locks/job", "POST,PATCH,DELETE,GET,HEAD"),
        ("LOCK", "/locks/job", "POST,PATCH,DELETE,GET,HEAD"),
        ("PUT", "/locks", "POST,PATCH,DELETE,GET,HEAD"),
        ("DELETE", "/livez", "GET,HEAD"),
        ("POST", "/readyz", "GET,HEAD"),
        ("POST", "/metrics", "GET,HEAD"),
        ("POST", "/console/history", "GET,HEAD"),
        ("POST", "/openapi.json", "GET,HEAD"),
    ] {
        let answer = call(method, path).send().await;
        assert_bad(
            &format!("{method} {path}"),
            &answer,
            405,
            "method_not_allowed",
            &["header Allow"],
        );
        let sorted = |list: &str| {
            let mut methods: Vec<String> =
                list.split(',').map(|method| method.trim().to_owned()).collect();
            methods.sort_unstable();
            methods
        };
        assert_eq!(sorted(answer.header("allow")), sorted(allowed), "{method} {path}");
    }
    let head = call("HEAD", "/locks/job").send().await;
    assert_eq!((head.status, head.body.len()), (200, 0), "{head:?}");
}

#[tokio::test]
async fn a_head_beyond_the_limit_is_431_and_invalid_http_is_400() {
    let gateway = Launch::embedded().start().await;
    let mut raw = gateway.raw().await;
    let _ = raw
        .try_write(format!(
            "GET /livez HTTP/1.1\r\nhost: localhost\r\nx-large: {}\r\n\r\n",
            "x".repeat(100 * 1024)
        ))
        .await;
    let answer = raw.answer().await;
    assert_eq!((answer.status, answer.text()), (431, String::new()));
    for garbage in ["GET /livez\u{1}HTTP/1.1\r\n\r\n", "GET /livez HTTP/1.1\r\nno colon\r\n\r\n"] {
        let mut raw = gateway.raw().await;
        raw.write(garbage).await;
        let answer = raw.answer().await;
        assert_eq!((answer.status, answer.text()), (400, String::new()), "{garbage:?}");
    }
    assert_eq!(gateway.get("/livez").await.status, 200);
}

#[tokio::test]
async fn two_requests_on_one_connection_get_two_answers() {
    let gateway = Launch::embedded().start().await;
    let mut raw = gateway.raw().await;
    for status in [201, 409] {
        raw.announce("POST", "job", "", 16).await;
        raw.write("{\"ttl_ms\": 60000}".get(..16).unwrap()).await;
        // The body is one byte short of being JSON. The next bytes on the connection must not
        // complete it.
        assert_eq!(raw.answer().await.status, 400);
        raw.announce("POST", "job", "", 2).await;
        raw.write("{}").await;
        assert_eq!(raw.answer().await.status, status);
    }
}

#[tokio::test]
async fn the_callers_request_id_is_used_when_it_is_valid() {
    let gateway = Launch::embedded().start().await;
    let with = |id: &[u8]| gateway.call(Method::GET, "/locks/").header("x-request-id", id);
    let longest = "i".repeat(128);
    for id in ["a", "5f2b7c0e-9a3d/4418", longest.as_str()] {
        let answer = with(id.as_bytes()).send().await;
        assert_eq!(answer.header("x-request-id"), id);
        assert_eq!(answer.problem(400, "invalid_name")["request_id"], id);
    }
    let too_long = "i".repeat(129);
    // The log shows ids.
    let token = gateway.acquire("job").await.token;
    for id in ["", "two words", "größe", too_long.as_str(), token.as_str()] {
        let answer = with(id.as_bytes()).send().await;
        let ours = answer.header("x-request-id");
        assert!(
            ours.len() == 16 && ours.bytes().all(|byte| byte.is_ascii_hexdigit()),
            "{id:?} gave {ours:?}"
        );
        answer.problem(400, "invalid_name");
    }
    let ids: std::collections::BTreeSet<String> =
        [gateway.get("/livez").await, gateway.get("/nowhere").await, gateway.get("/docs/").await]
            .iter()
            .map(|answer| answer.header("x-request-id").to_owned())
            .collect();
    assert_eq!(ids.len(), 3, "every answer has a different id: {ids:?}");
    assert!(!ids.contains(""));
}
