//! The OpenAPI documents in this repository, and checks of answers against them.

use std::sync::LazyLock;

use http::Method;
use serde_json::Value;

use crate::support::client::Answer;

pub(crate) const COMMITTED: &str = include_str!("../../openapi/openapi.json");
pub(crate) const COMMITTED_TWIN: &str = include_str!("../../openapi/openapi-3.0.json");

pub(crate) fn document() -> Value {
    serde_json::from_str(COMMITTED).expect("openapi/openapi.json is JSON")
}

pub(crate) fn twin() -> Value {
    serde_json::from_str(COMMITTED_TWIN).expect("openapi/openapi-3.0.json is JSON")
}

/// Fails the test if an answer to a documented operation does not match the document.
#[track_caller]
pub(crate) fn hold_against_document(method: &Method, path: &str, answer: &Answer) {
    let path = path.split('?').next().unwrap_or_default();
    let template = match path.strip_prefix("/locks/") {
        Some(name) if !name.is_empty() && !name.contains('/') => "/locks/{name}",
        _ => path,
    };
    static DOCUMENT: LazyLock<Value> = LazyLock::new(document);
    let document = &*DOCUMENT;
    let operation = &document["paths"][template][method.as_str().to_ascii_lowercase()];
    if operation.is_null() {
        return;
    }
    let listed = &operation["responses"][answer.status.to_string()];
    assert!(!listed.is_null(), "{method} {template} does not list {}: {answer:?}", answer.status);
    let content = listed["content"].as_object();
    let media_type = answer.header("content-type").split(';').next().unwrap_or_default();
    let Some(content) = content else {
        assert!(
            answer.body.is_empty(),
            "{method} {template} lists no body for {}: {answer:?}",
            answer.status
        );
        return;
    };
    let listed = content.get(media_type).unwrap_or_else(|| {
        panic!("{method} {template} does not list {media_type:?} for {}: {answer:?}", answer.status)
    });
    if media_type.ends_with("json") {
        let at = format!("{method} {template} {}", answer.status);
        check(document, &listed["schema"], &answer.json(), &at);
    }
}

/// Fails the test if a value does not match a named schema.
#[track_caller]
pub(crate) fn assert_schema(name: &str, value: &Value) {
    let document = document();
    let schema = &document["components"]["schemas"][name];
    assert!(!schema.is_null(), "there is no schema {name}");
    check(&document, schema, value, name);
}

/// Checks a value against a schema, with the part of JSON Schema that the documents use. A field
/// that is not in the schema is a failure, because every field must be documented.
#[track_caller]
pub(crate) fn check(document: &Value, schema: &Value, value: &Value, at: &str) {
    let schema = resolve(document, schema);
    match schema["type"].as_str() {
        Some("object") => {
            let fields =
                value.as_object().unwrap_or_else(|| panic!("{at} is not an object: {value}"));
            for name in
                schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str)
            {
                assert!(fields.contains_key(name), "{at} lacks {name}: {value}");
            }
            for (name, value) in fields {
                let property =
                    schema["properties"].get(name).unwrap_or(&schema["additionalProperties"]);
                assert!(property.is_object(), "{at} has a field that is not documented: {name}");
                check(document, property, value, &format!("{at}.{name}"));
            }
        }
        Some("array") => {
            let items = value.as_array().unwrap_or_else(|| panic!("{at} is not an array: {value}"));
            items
                .iter()
                .for_each(|item| check(document, &schema["items"], item, &format!("{at}[]")));
        }
        Some("string") => {
            let text = value.as_str().unwrap_or_else(|| panic!("{at} is not a string: {value}"));
            let allowed = schema["enum"].as_array();
            assert!(
                allowed.is_none_or(|list| list.iter().any(|word| word == text)),
                "{at} may not be {text:?}"
            );
        }
        Some("integer") => {
            let number =
                value.as_i64().unwrap_or_else(|| panic!("{at} is not an integer: {value}"));
            let max = if schema["format"] == "int32" { i64::from(i32::MAX) } else { i64::MAX };
            let least = schema["minimum"].as_i64().unwrap_or(i64::MIN);
            assert!((least..=max).contains(&number), "{at} is out of range: {value}");
        }
        Some("boolean") => assert!(value.is_boolean(), "{at} is not a boolean: {value}"),
        other => panic!("{at}: the tests do not know the type {other:?}"),
    }
}

fn resolve<'a>(document: &'a Value, schema: &'a Value) -> &'a Value {
    match schema["$ref"].as_str() {
        Some(pointer) => {
            document.pointer(pointer.trim_start_matches('#')).expect("a reference has a target")
        }
        None => schema,
    }
}
