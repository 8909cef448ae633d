//! Headers for browsers. They say where pages may be framed, what pages may load, and which sites'
//! scripts may call the API.

use http::{HeaderMap, Method};
use serde_json::json;

use crate::support::client::{Answer, Call};
use crate::support::gateway::{Gateway, Launch, Scratch};

/// The value of a header as a list of lower-case words.
fn words(headers: &HeaderMap, name: &str) -> Vec<String> {
    let values = headers.get_all(name).iter().map(|value| value.to_str().expect("plain text"));
    let mut words: Vec<String> =
        values.flat_map(|value| value.split(',')).map(|word| word.trim().to_lowercase()).collect();
    words.sort_unstable();
    words
}

#[tokio::test]
async fn pages_declare_their_sources_and_forbid_framing() {
    let gateway = Launch::embedded().start().await;
    for (path, status) in [
        ("/docs", 303),
        ("/docs/", 200),
        ("/docs/api", 303),
        ("/docs/api/", 200),
        ("/docs/api/swagger-ui.css", 200),
        ("/docs/api/swagger-initializer.js", 200),
        ("/docs/swagger-ui.css", 404),
        ("/docs/none", 404),
        ("/openapi.json", 200),
        ("/openapi-3.0.json", 200),
    ] {
        let answer = gateway.get(path).await;
        assert_eq!(answer.status, status, "{path}");
        let mut policy: Vec<&str> =
            answer.header("content-security-policy").split(';').map(str::trim).collect();
        policy.sort_unstable();
        let allowed = [
            "base-uri 'none'",
            "connect-src 'self'",
            "default-src 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "img-src 'self' data:",
            "script-src 'self'",
            "style-src 'self' 'sha256-RL3ie0nH+Lzz2YNqQN83mnU0J1ot4QL7b99vMdIX99w='",
        ];
        assert_eq!(policy, allowed, "{path}");
        for (name, value) in [
            ("x-content-type-options", "nosniff"),
            ("x-frame-options", "DENY"),
            ("referrer-policy", "no-referrer"),
        ] {
            assert_eq!(answer.header(name), value, "{path}");
        }
    }
    // The policy forbids inline scripts and styles, so the page must contain none.
    let page = gateway.get("/docs/api/").await.text();
    for inline in ["<style", "style=", "onload=", "onclick=", "javascript:"] {
        assert!(!page.contains(inline), "{inline} in\n{page}");
    }
    assert!(
        page.split("<script").skip(1).all(|script| script.trim_start().starts_with("src=")),
        "{page}"
    );

    // This command makes such a digest: openssl dgst -sha256 -binary | base64.
    let logo = ".logo_small_svg__cls-2{fill:#fff}.logo_small_svg__cls-3{fill:#85ea2d}";
    let script = gateway.get("/docs/api/swagger-ui-standalone-preset.js").await.text();
    assert!(
        script.contains(&format!("createElement(\"style\",null,\"{logo}\")")),
        "the digest of the inline style differs"
    );
    assert_eq!(
        script.matches("createElement(\"style\",").count(),
        1,
        "there are more inline styles: add their digests"
    );

    for answer in [
        gateway.get("/locks/job").await,
        gateway.post("job", json!({})).await,
        gateway.get("/livez").await,
    ] {
        for name in
            ["content-security-policy", "x-frame-options", "access-control-allow-origin", "vary"]
        {
            assert_eq!(
                answer.header(name),
                "",
                "no page of this origin may read the answer: {answer:?}"
            );
        }
    }
}

const PAGE: &str = "https://ops.example.com";

fn preflight(gateway: &Gateway, path: &str, origin: &str, method: &str) -> Call {
    let call = gateway.call(Method::OPTIONS, path).header("origin", origin);
    call.header("access-control-request-method", method)
        .header("access-control-request-headers", "lock-token")
}

fn allowed_origin(answer: &Answer) -> &str {
    assert_eq!(answer.header("access-control-allow-credentials"), "", "{answer:?}");
    answer.header("access-control-allow-origin")
}

#[tokio::test]
async fn by_default_no_page_of_another_origin_may_call() {
    let gateway = Launch::embedded().start().await;
    let asked = preflight(&gateway, "/locks/job", PAGE, "POST").send().await;
    assert_eq!(allowed_origin(&asked), "");
    asked.problem(405, "method_not_allowed");
    let called = gateway.call(Method::GET, "/locks/job").header("origin", PAGE).send().await;
    assert_eq!(allowed_origin(&called), "");
    called.problem(403, "forbidden");
}

#[tokio::test]
async fn only_pages_of_named_origins_may_call() {
    let other = "http://localhost:3000";
    let file = Scratch::new("gateway.toml", &format!("cors_origins = ['{PAGE}', '{other}']"));
    for launch in [
        Launch::embedded().more("--cors-origin", PAGE).more("--cors-origin", other),
        Launch::embedded().env("REDLOCK_CORS_ORIGINS", &format!("{PAGE},{other}")),
        Launch::embedded().flag("--config", file.path()),
    ] {
        let gateway = launch.start().await;
        for origin in [PAGE, other] {
            let asked = preflight(&gateway, "/locks/job", origin, "POST").send().await;
            assert_eq!((asked.status, allowed_origin(&asked)), (200, origin), "{asked:?}");
            assert_eq!(
                words(&asked.headers, "access-control-allow-methods"),
                ["delete", "get", "patch", "post"]
            );
            let headers = [
                "authorization",
                "content-type",
                "idempotency-key",
                "last-event-id",
                "lock-token",
                "prefer",
            ];
            assert_eq!(words(&asked.headers, "access-control-allow-headers"), headers);
            assert!(words(&asked.headers, "vary").contains(&"origin".to_owned()), "{asked:?}");
        }
        for origin in [
            "https://evil.example.com",
            "https://ops.example.com.evil.com",
            "http://ops.example.com",
            "null",
        ] {
            let asked = preflight(&gateway, "/locks/job", origin, "POST").send().await;
            assert_eq!(allowed_origin(&asked), "", "{origin}");
            let called =
                gateway.call(Method::GET, "/locks/job").header("origin", origin).send().await;
            assert_eq!(allowed_origin(&called), "", "{origin}");
            assert!(
                words(&called.headers, "vary").contains(&"origin".to_owned()),
                "a cache must distinguish origins"
            );
        }
    }

    let gateway = Launch::embedded().more("--cors-origin", PAGE).start().await;
    let from_page = |method: Method, path: &str| gateway.call(method, path).header("origin", PAGE);
    for answer in [
        from_page(Method::POST, "/locks/job").send().await,
        from_page(Method::POST, "/locks/job").send().await,
        from_page(Method::GET, "/nowhere").send().await,
        from_page(Method::DELETE, "/locks/job").send().await,
    ] {
        assert_eq!(
            allowed_origin(&answer),
            PAGE,
            "a page must be able to read why it was refused: {answer:?}"
        );
        let exposed = [
            "idempotency-replayed",
            "location",
            "lock-token",
            "preference-applied",
            "retry-after",
            "x-request-id",
        ];
        assert_eq!(words(&answer.headers, "access-control-expose-headers"), exposed);
    }
}

#[tokio::test]
async fn an_invalid_origin_is_refused_at_the_start() {
    for (origin, word) in [
        ("*", "every page"),
        ("https://*.example.com", "every page"),
        ("ops.example.com", "exact origin"),
        ("https://ops.example.com/", "write it as https://ops.example.com"),
        ("HTTPS://ops.example.com", "write it as https://ops.example.com"),
    ] {
        for launch in [
            Launch::embedded().more("--cors-origin", PAGE).more("--cors-origin", origin),
            Launch::embedded().env("REDLOCK_CORS_ORIGINS", &format!("{PAGE},{origin}")),
        ] {
            let refused = launch.finish().await;
            assert_eq!((refused.code, refused.stdout.as_str()), (Some(2), ""), "{refused:?}");
            for word in ["--cors-origin", origin, word] {
                assert!(refused.stderr.contains(word), "no {word:?} in {refused:?}");
            }
        }
    }
}
