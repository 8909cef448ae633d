//! The OpenAPI document. It equals the one that the program prints and serves. It lists every
//! answer that the tests receive. Client generators can read it. Their weaknesses are the reason
//! for the rules in the last part of this file: some generators drop nullable fields and unions, or
//! give them a wrong type. One of them turns every error into a success if the document has a
//! `default` answer.

use std::collections::BTreeSet;

use http::Method;
use serde_json::{Map, Value, json};

use crate::support::gateway::{Launch, binary};
use crate::support::openapi::{COMMITTED, COMMITTED_TWIN, check, document, twin};

/// Calls `visit` with every object in a document, and with the path of the object.
fn walk(value: &Value, at: &str, visit: &mut impl FnMut(&str, &Map<String, Value>)) {
    match value {
        Value::Object(object) => {
            visit(at, object);
            // Examples are data, so they may have any shape and are not visited.
            for (key, value) in
                object.iter().filter(|(key, _)| !matches!(key.as_str(), "example" | "examples"))
            {
                walk(value, &format!("{at}/{}", key.replace('/', "~1")), visit);
            }
        }
        Value::Array(items) => {
            items
                .iter()
                .enumerate()
                .for_each(|(index, item)| walk(item, &format!("{at}/{index}"), visit));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// The schemas of a document: those with a name, and everything below a `schema`.
fn schemas(document: &Value) -> Vec<(String, Map<String, Value>)> {
    let mut found = Vec::new();
    walk(document, "", &mut |at, object| {
        if at.contains("/schema") && at != "/components/schemas" && !at.ends_with("/properties") {
            found.push((at.to_owned(), object.clone()));
        }
    });
    assert!(found.len() > 40, "only {} schemas were found", found.len());
    found
}

fn operations(document: &Value) -> Vec<(String, &Value)> {
    let paths = document["paths"].as_object().expect("paths");
    let of_path = |(path, item): (&String, &'_ Value)| {
        let path = path.clone();
        item.as_object()
            .expect("a path item")
            .keys()
            .filter(|key| ["get", "post", "patch", "put", "delete"].contains(&key.as_str()))
            .map(move |method| (method.clone(), path.clone()))
            .collect::<Vec<_>>()
    };
    let keys: Vec<_> = paths.iter().flat_map(of_path).collect();
    keys.into_iter()
        .map(|(method, path)| (format!("{method} {path}"), &document["paths"][&path][&method]))
        .collect()
}

#[tokio::test]
async fn the_committed_documents_are_those_printed_and_served() {
    let gateway = Launch::embedded().start().await;
    for (file, version, path, committed) in [
        ("openapi/openapi.json", "3.1", "/openapi.json", COMMITTED),
        ("openapi/openapi-3.0.json", "3.0", "/openapi-3.0.json", COMMITTED_TWIN),
    ] {
        let printed = Launch::bare(&["openapi", "--version", version]).finish().await;
        assert_eq!((printed.code, printed.stderr.as_str()), (Some(0), ""));
        assert!(
            printed.stdout == committed,
            "{file} is out of date; run: {} openapi --version {version} > {file}",
            binary().display()
        );
        let served = gateway.get(path).await;
        assert_eq!((served.status, served.header("content-type")), (200, "application/json"));
        // A gateway is reached by many addresses, so its own document has a relative one.
        let mut expected: Value = serde_json::from_str(committed).unwrap();
        expected["servers"] = json!([{ "url": ".", "description": "this gateway" }]);
        assert_eq!(served.json(), expected, "{path} and {file} differ");
    }
    let printed = Launch::bare(&["openapi"]).finish().await;
    assert!(printed.stdout == COMMITTED, "3.1 is the default");
    let refused = Launch::bare(&["openapi", "--version", "2.0"]).finish().await;
    assert_eq!(refused.code, Some(2));
    assert!(
        ["--version", "2.0", "3.0", "3.1"].iter().all(|word| refused.stderr.contains(word)),
        "{}",
        refused.stderr
    );
}

#[test]
fn both_documents_state_their_version_and_list_all_operations() {
    let document = document();
    let twin = twin();
    assert!(document["openapi"].as_str().unwrap().starts_with("3.1."), "{}", document["openapi"]);
    assert_eq!(twin["openapi"], "3.0.3");
    let names = |document: &Value| -> Vec<String> {
        operations(document).into_iter().map(|(name, _)| name).collect()
    };
    assert_eq!(names(&document), names(&twin));
    assert_eq!(
        names(&document),
        [
            "post /locks/{name}",
            "patch /locks/{name}",
            "delete /locks/{name}",
            "get /locks/{name}",
            "get /locks",
            "patch /locks",
            "post /locks",
            "delete /locks",
            "post /requests",
            "get /requests/{id}",
            "delete /requests/{id}",
            "get /readyz",
            "get /healthz",
            "get /livez",
            "get /metrics",
        ]
    );
}

#[test]
fn every_operation_has_a_name_of_its_own() {
    let document = document();
    let ids: Vec<_> = operations(&document)
        .into_iter()
        .map(|(name, operation)| {
            let id = operation["operationId"]
                .as_str()
                .unwrap_or_else(|| panic!("{name} has no operationId"));
            assert!(
                id.chars().all(|c| c.is_ascii_alphanumeric()),
                "{id} is not a good method name"
            );
            id.to_owned()
        })
        .collect();
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "{ids:?}");
}

#[test]
fn no_schema_uses_what_generators_drop_or_mistype() {
    for (name, document) in [("openapi.json", document()), ("openapi-3.0.json", twin())] {
        for (at, schema) in schemas(&document) {
            for keyword in ["nullable", "oneOf", "allOf", "anyOf", "not", "const"] {
                assert!(!schema.contains_key(keyword), "{name} {at} has {keyword}");
            }
            assert!(
                !matches!(schema.get("type"), Some(Value::Array(_))),
                "{name} {at} has a list of types"
            );
        }
    }
}

#[test]
fn every_integer_has_a_format() {
    let mut integers = 0;
    for (at, schema) in schemas(&document()) {
        if schema.get("type").is_some_and(|kind| kind == "integer") {
            integers += 1;
            assert!(
                schema.get("format").is_some_and(|f| f == "int32" || f == "int64"),
                "{at} is {schema:?}"
            );
        }
    }
    assert!(integers > 10, "only {integers} integers were found");
}

#[test]
fn every_named_schema_has_an_example_of_itself() {
    for document in [document(), twin()] {
        for (name, schema) in document["components"]["schemas"].as_object().unwrap() {
            let example = schema.get("example").or_else(|| schema.get("examples")?.get(0));
            let example = example.unwrap_or_else(|| panic!("{name} has no example"));
            check(&document, schema, example, name);
        }
    }
}

#[test]
fn every_operation_lists_its_statuses_and_types() {
    let reading = ["400", "401", "403", "421", "429", "500", "503"];
    let with_a_body = ["400", "401", "403", "408", "409", "413", "415", "421", "429", "500", "503"];
    let expected = |name: &str| -> Vec<&str> {
        match name {
            "post /locks/{name}" | "post /locks" => {
                ["201"].into_iter().chain(with_a_body).collect()
            }
            "post /requests" => ["202"].into_iter().chain(with_a_body).collect(),
            "get /requests/{id}" => {
                vec!["200", "400", "401", "403", "404", "421", "429", "500"]
            }
            "delete /requests/{id}" => ["204", "404"].into_iter().chain(reading).collect(),
            "patch /locks/{name}" => ["200", "404"].into_iter().chain(with_a_body).collect(),
            "patch /locks" => {
                let no_conflict = with_a_body.into_iter().filter(|status| *status != "409");
                ["200"].into_iter().chain(no_conflict).collect()
            }
            "delete /locks/{name}" => ["204", "404", "409"].into_iter().chain(reading).collect(),
            "delete /locks" => ["200", "404", "409"].into_iter().chain(reading).collect(),
            "get /locks/{name}" | "get /locks" => ["200"].into_iter().chain(reading).collect(),
            "get /readyz" | "get /healthz" => vec!["200", "421", "503"],
            "get /livez" => vec!["200", "421", "500"],
            "get /metrics" => vec!["200", "401", "403", "421", "429", "500"],
            _ => panic!("{name} is new: list its statuses here"),
        }
    };
    let document = document();
    for (name, operation) in operations(&document) {
        let responses = operation["responses"].as_object().unwrap();
        assert!(!responses.contains_key("default"), "{name} has a default answer");
        let listed: BTreeSet<&str> = responses.keys().map(String::as_str).collect();
        assert_eq!(listed, expected(&name).into_iter().collect(), "{name}");
        // A probe by a wrong name has an answer of its own. The older document leaves it out, because
        // its generators take one type for each result.
        let is_probe = name.ends_with("/readyz") || name.ends_with("/healthz");
        for success in [true, false] {
            let types: BTreeSet<String> = responses
                .iter()
                .filter(|(status, _)| status.starts_with('2') == success)
                .filter(|(status, _)| !is_probe || *status != "421")
                .flat_map(|(_, response)| response["content"].as_object().into_iter().flatten())
                .map(|(media_type, content)| format!("{media_type} {}", content["schema"]))
                .collect();
            assert!(types.len() <= 1, "{name} has several types for one result: {types:?}");
        }
    }
}

#[test]
fn every_error_shows_an_example_of_each_of_its_codes() {
    for document in [document(), twin()] {
        let schema = &document["components"]["schemas"]["Problem"];
        let codes = schema["properties"]["code"]["enum"].as_array().unwrap();
        assert!(codes.len() > 20, "{codes:?}");
        for (name, operation) in operations(&document) {
            for (status, response) in operation["responses"].as_object().unwrap() {
                let Some(content) = response["content"].get("application/problem+json") else {
                    continue;
                };
                let examples = content["examples"].as_object().unwrap();
                assert!(!examples.is_empty(), "{name} {status} has no example");
                for (code, example) in examples {
                    check(&document, schema, &example["value"], &format!("{name} {status} {code}"));
                    assert_eq!(example["value"]["code"], **code);
                    assert_eq!(example["value"]["status"].to_string(), *status);
                    assert!(codes.contains(&example["value"]["code"]), "{code}");
                }
            }
        }
    }
}

#[test]
fn the_older_document_uses_no_newer_features() {
    let twin = twin();
    assert!(twin["info"]["license"].get("identifier").is_none());
    assert!(twin.get("webhooks").is_none() && twin.get("jsonSchemaDialect").is_none());
    for (at, schema) in schemas(&twin) {
        for keyword in [
            "examples",
            "propertyNames",
            "patternProperties",
            "$schema",
            "$defs",
            "contentMediaType",
            "if",
        ] {
            assert!(!schema.contains_key(keyword), "{at} has {keyword}");
        }
        for keyword in ["exclusiveMinimum", "exclusiveMaximum"] {
            assert!(
                schema.get(keyword).is_none_or(Value::is_boolean),
                "{at} has a number for {keyword}"
            );
        }
        // OpenAPI 3.0 ignores everything that stands beside a reference.
        assert!(
            !schema.contains_key("$ref") || schema.len() == 1,
            "{at} has more than a reference: {schema:?}"
        );
    }
}

#[tokio::test]
async fn the_documentation_page_loads_nothing_from_elsewhere() {
    let gateway = Launch::embedded().start().await;
    let moved = gateway.get("/docs").await;
    assert_eq!((moved.status, moved.header("location")), (303, "docs/"), "{moved:?}");
    let page = gateway.get("/docs/api/").await;
    assert_eq!(page.status, 200);
    assert!(page.header("content-type").starts_with("text/html"), "{page:?}");
    let html = page.text();
    assert!(
        !html.contains("http://") && !html.contains("https://"),
        "the page loads from elsewhere:\n{html}"
    );

    let assets: Vec<&str> = ["href=\"", "src=\""]
        .iter()
        .flat_map(|attribute| {
            html.split(attribute).skip(1).filter_map(|rest| rest.split('"').next())
        })
        .collect();
    assert!(assets.len() >= 4, "{assets:?}");
    for asset in assets {
        assert!(
            !asset.starts_with("//") && !asset.contains(':'),
            "{asset} is not served by the gateway"
        );
        let path = crate::http::docs::target("/docs/api/", asset);
        let served = gateway.get(&path).await;
        assert!(served.status == 200 && !served.body.is_empty(), "{path}: {}", served.status);
        if asset.contains("initializer") {
            assert!(
                served.text().contains("\"../../openapi.json\""),
                "the page shows another document:\n{}",
                served.text()
            );
        }
    }
}

#[tokio::test]
async fn examples_of_refusals_are_what_the_gateway_answers() {
    let gateway = Launch::embedded().flag("--max-wait", "25s").start().await;
    let token = gateway.acquire("other").await.token;
    let document = document();
    let json = "application/json";
    for (method, path, headers, body) in [
        (Method::POST, "/locks/abc%20d", vec![], ""),
        (Method::POST, "/locks/a", vec![("content-type", json)], r#"{"ttl_ms":5}"#),
        (Method::POST, "/locks/a", vec![("content-type", json)], r#"{"wait_ms":60000}"#),
        (Method::POST, "/locks/a", vec![("content-type", json)], r#"{"ttl":5}"#),
        (Method::POST, "/locks/a", vec![("idempotency-key", "short")], ""),
        (Method::POST, "/locks/a", vec![], "{}"),
        (Method::PATCH, "/locks/a", vec![], ""),
        (Method::PATCH, "/locks/a", vec![("lock-token", "no token")], ""),
        (Method::PATCH, "/locks/a", vec![("lock-token", &*token)], ""),
    ] {
        let verb = method.as_str().to_lowercase();
        let mut call = gateway.call(method, path);
        for (name, value) in headers {
            call = call.header(name, value);
        }
        let answer = call.body(body).send().await;
        let problem = answer.json();
        let code = problem["code"].as_str().expect("a code");
        let at = format!(
            "/paths/~1locks~1{{name}}/{verb}/responses/{}/content/application~1problem+json/examples/{code}/value/detail",
            answer.status
        );
        assert_eq!(document.pointer(&at), Some(&problem["detail"]), "{at}");
    }
}
