//! The documentation that the gateway serves: every link leads somewhere, and every page can be
//! read on a phone.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use crate::http::keys::{file, key, with_keys};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{eventually, masters};

/// The values of an attribute in a page.
fn values<'a>(page: &'a str, attribute: &str) -> BTreeSet<&'a str> {
    let start = format!(" {attribute}=\"");
    let parts = page.split(start.as_str()).skip(1);
    parts.filter_map(|part| part.split('"').next()).collect()
}

/// The path to which a link of this page leads, without its section.
pub(crate) fn target(page: &str, link: &str) -> String {
    let link = link.split('#').next().unwrap_or_default();
    if link.is_empty() {
        return page.to_owned();
    }
    let mut folders: Vec<&str> = page.split('/').collect();
    folders.pop();
    for part in link.split('/') {
        match part {
            ".." => drop(folders.pop()),
            "." => {}
            part => folders.push(part),
        }
    }
    folders.join("/")
}

/// Follows all links from the first page. Returns each page of the documentation by its path.
async fn all_pages(gateway: &Gateway) -> BTreeMap<String, String> {
    let mut pages = BTreeMap::new();
    let mut seen = BTreeSet::new();
    let mut next = vec!["/docs/".to_owned()];
    while let Some(path) = next.pop() {
        if !seen.insert(path.clone()) {
            continue;
        }
        let answer = gateway.get(&path).await;
        assert_eq!(answer.status, 200, "{path} is linked");
        if answer.header("content-type").starts_with("text/html") && path.starts_with("/docs/") {
            let page = answer.text();
            let links = values(&page, "href").into_iter().chain(values(&page, "src"));
            let internal = links.filter(|link| !link.contains("://"));
            next.extend(internal.map(|link| target(&path, link)));
            pages.insert(path, page);
        }
    }
    pages
}

#[tokio::test]
async fn every_link_and_anchor_of_the_documentation_resolves() {
    let gateway = Launch::embedded().start().await;
    let pages = all_pages(&gateway).await;
    for name in
        ["masters", "symptoms", "runbook", "configuration", "behind-a-proxy", "safety", "fencing"]
    {
        assert!(pages.contains_key(&format!("/docs/{name}")), "{name}: {:?}", pages.keys());
    }
    let mut anchors = 0;
    for (path, page) in &pages {
        for link in values(page, "href").into_iter().filter(|link| !link.contains("://")) {
            let Some((name, anchor)) = link.split_once('#') else { continue };
            let to = &pages[&target(path, name)];
            assert!(values(to, "id").contains(anchor), "{path}: {link}");
            anchors += 1;
        }
    }
    assert!(anchors > 30, "{anchors} links to sections are too few");
}

#[tokio::test]
async fn pages_of_the_documentation_suit_phones_and_the_policy() {
    let gateway = Launch::embedded().start().await;
    let api = gateway.get("/docs/api/").await;
    for (path, page) in all_pages(&gateway).await {
        if path == "/docs/api/" {
            continue;
        }
        let answer = gateway.get(&path).await;
        assert_eq!(answer.header("content-type"), "text/html; charset=utf-8", "{path}");
        for header in ["content-security-policy", "x-frame-options", "referrer-policy"] {
            assert_eq!(answer.header(header), api.header(header), "{path}");
        }
        assert!(page.contains("<meta name=\"viewport\" content=\"width=device-width"), "{path}");
        for forbidden in ["src=\"\"", "<style", "style=", "<script", "javascript:", "onclick="] {
            assert!(!page.contains(forbidden), "{forbidden} in {path}");
        }
        assert_eq!(page.matches("<h1").count(), 1, "{path}");
    }
    let styles = gateway.get("/docs/pages.css").await;
    assert_eq!(styles.header("content-type"), "text/css; charset=utf-8");
    assert!(styles.text().contains("overflow-x: auto"), "wide tables and lines scroll");
}

#[tokio::test]
async fn answers_link_to_the_runbook_by_url() {
    for (url, prefix) in [("", ""), ("https://locks.example.com/", "https://locks.example.com")] {
        let mut servers = masters(3);
        let mut launch = Launch::over(&servers).flag("--node-timeout", "50ms");
        if !url.is_empty() {
            launch = launch.flag("--public-url", url);
        }
        let gateway = launch.ready().await;
        servers.iter_mut().for_each(|server| server.kill());
        let problem = gateway.post("job", json!({})).await.problem(503, "quorum_unavailable");
        let health = eventually("the gateway is not ready", async || {
            let health = gateway.readyz().await;
            (health.status == 503).then(|| health.json())
        })
        .await;
        for answer in [&problem, &health] {
            let link = format!("{prefix}/docs/symptoms#quorum-lost");
            assert_eq!(answer["runbook"], json!(link), "{answer}");
        }
        let page = gateway.get("/docs/symptoms").await.text();
        assert!(values(&page, "id").contains("quorum-lost"));
    }
}

#[tokio::test]
async fn an_unusable_public_url_is_refused() {
    for url in ["locks.example.com", "ftp://a", "https://user@a", "https://a?b", "https://a#b"] {
        let refused = Launch::embedded().flag("--public-url", url).finish().await;
        assert_eq!(refused.code, Some(2), "{url}: {refused:?}");
        for word in ["--public-url", "https://locks.example.com"] {
            assert!(refused.stderr.contains(word), "{url}: {refused:?}");
        }
    }
}

#[tokio::test]
async fn the_console_is_served_to_everybody_under_the_same_policy() {
    let file = file(&[&key("known", "list", "*").await]);
    let gateway = with_keys(&file).start().await;
    let moved = gateway.get("/console").await;
    assert_eq!((moved.status, moved.header("location")), (303, "console/"));
    let page = gateway.get("/console/").await;
    assert_eq!((page.status, page.header("content-type")), (200, "text/html; charset=utf-8"));
    let policy = page.header("content-security-policy");
    assert!(policy.contains("default-src 'none'") && policy.contains("connect-src 'self'"));
    let text = page.text();
    let own = |name: &str| values(&text, name).into_iter().filter(|file| file.starts_with("./"));
    let files: Vec<_> = own("href").chain(own("src")).collect();
    assert!(files.len() > 2, "{files:?}");
    for name in files {
        let answer = gateway.get(&format!("/console/{}", &name[2..])).await;
        let kind = match name.rsplit_once('.').expect("a file with an extension").1 {
            "css" => "text/css",
            "svg" => "image/svg+xml",
            _ => "text/javascript",
        };
        assert_eq!(answer.status, 200, "{name}");
        assert!(answer.header("content-type").starts_with(kind), "{answer:?}");
        assert_eq!(answer.header("content-security-policy"), policy);
    }
    for absent in ["/console/index.html", "/console/other.js", "/console/a/b"] {
        gateway.get(absent).await.problem(404, "not_found");
    }
    // The calls behind the page need a key.
    gateway.get("/locks").await.problem(401, "unauthenticated");
}
