//! The OpenAPI document, generated from the handlers: 3.1, and 3.0.3 for generators without 3.1.

use std::collections::BTreeMap;

use redlock_api::{
    HeldLock, Lagged, LockReady, LockSnapshot, PROBLEM_MEDIA_TYPE, Problem, ProblemCode, StreamEnd,
};
use redlock_core::LockName;
use redlock_core::node::{Engine, NodeState, Reason};
use serde_json::{Map, Value, json};
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::response::Response;
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{RefOr, Required};
use utoipa::{IntoParams, IntoResponses, Modify, OpenApi};

use super::error;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "redlock-gateway",
        description = "Distributed locks over plain HTTP, on independent Redis masters. POST acquires, PATCH extends, DELETE releases. A majority of the nodes grants a lock. It is the client's until *sent* + `elapsed_ms` + `validity_ms`, where *sent* is when the client sent the request; a resource checks its `fencing_token`.\n\nErrors are `application/problem+json`; programs use `code`. Only 431, and 400 for a request that is not HTTP, have no body.",
        license(name = "MIT OR Apache-2.0", identifier = "MIT OR Apache-2.0")
    ),
    servers((url = "http://127.0.0.1:8080", description = "a gateway at its default address")),
    modifiers(&Keys),
    components(schemas(Problem, LockReady, LockSnapshot, Lagged, StreamEnd)),
    security((), ("bearer" = []), ("basic" = [])),
    tags((name = "locks", description = "Acquire, extend, release, inspect"), (name = "operations", description = "Probes and metrics"))
)]
pub struct ApiDoc;

/// The security schemes for API keys.
struct Keys;

impl Modify for Keys {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let components = document.components.get_or_insert_default();
        for (name, scheme, text) in [
            ("bearer", HttpAuthScheme::Bearer, "An API key. A gateway without keys needs none."),
            (
                "basic",
                HttpAuthScheme::Basic,
                "The name of an API key as the user, and the key as the password.",
            ),
        ] {
            let scheme = HttpBuilder::new().scheme(scheme).description(Some(text)).build();
            components.add_security_scheme(name, SecurityScheme::Http(scheme));
        }
    }
}

/// The lock's name in the path.
pub(super) struct LockPath;

impl IntoParams for LockPath {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let schema = ObjectBuilder::new()
            .schema_type(Type::String)
            .min_length(Some(1))
            .max_length(Some(LockName::MAX_LEN))
            .pattern(Some(LockName::PATTERN));
        let name = ParameterBuilder::new()
            .name("name")
            .parameter_in(ParameterIn::Path)
            .required(Required::True)
            .description(Some(
                "The lock's name: 1 to 255 bytes of [A-Za-z0-9._:@/+~-]. A slash may be sent as it is, or percent-encoded. No segment between slashes is empty, . or ..",
            ))
            .example(Some(json!("reports/nightly")))
            .schema(Some(schema));
        vec![name.build()]
    }
}

/// Errors that several operations share. Here and at the handlers, the description of a status
/// begins with its codes. From these codes [`document`] adds body, examples and headers.
macro_rules! shared_errors {
    ($name:ident { $($status:literal: $codes:literal),+ }) => {
        pub(super) struct $name;

        impl IntoResponses for $name {
            fn responses() -> BTreeMap<String, RefOr<Response>> {
                [$(($status.to_owned(), RefOr::T(Response::new($codes)))),+].into()
            }
        }
    };
}

shared_errors!(CommonErrors { "401": "unauthenticated", "403": "forbidden", "421": "misdirected_request", "429": "rate_limited", "500": "internal_error" });
shared_errors!(BodyErrors { "408": "request_timeout", "413": "body_too_large", "415": "unsupported_media_type" });

/// The order of the operations in the document: those that a reader needs first come first.
const ORDER: [&str; 15] = [
    "acquireLock",
    "extendLock",
    "releaseLock",
    "getLock",
    "listLocks",
    "extendLocks",
    "acquireLocks",
    "releaseLocks",
    "createRequest",
    "getRequest",
    "cancelRequest",
    "getReadiness",
    "getHealth",
    "getLiveness",
    "getMetrics",
];

/// The document, as it is served and committed.
pub fn document(generated: &utoipa::openapi::OpenApi) -> Value {
    let mut document = serde_json::to_value(generated).unwrap_or_default();
    // The generator adds a contact. It is removed, because the project names none.
    if let Some(info) = document.get_mut("info").and_then(Value::as_object_mut) {
        info.shift_remove("contact");
    }
    for (schema, property, labels) in labels() {
        document["components"]["schemas"][schema]["properties"][property]["enum"] = labels.into();
    }
    // The names of a set, in a body and in a query. Each of them may be there once.
    for names in [
        "/components/schemas/AcquireSetBody/properties/names",
        "/components/schemas/DeferBody/properties/names",
        "/paths/~1locks/delete/parameters/0/schema",
    ] {
        if let Some(names) = document.pointer_mut(names) {
            let pattern = LockName::PATTERN;
            names["items"] = json!({ "type": "string", "minLength": 1, "maxLength": LockName::MAX_LEN, "pattern": pattern });
            names["uniqueItems"] = true.into();
        }
    }
    let paths = document["paths"].take();
    document["paths"] = ordered(paths);
    let paths = document["paths"].as_object_mut().into_iter().flat_map(Map::values_mut);
    for operation in paths.filter_map(Value::as_object_mut).flat_map(Map::values_mut) {
        // The generator marks every body as required. Only bodies with a list of leases or names
        // are: the other bodies may be omitted.
        let is_required = operation.get("operationId").is_some_and(|id| {
            ["extendLocks", "acquireLocks", "createRequest"].iter().any(|of| id == of)
        });
        if let Some(body) = operation.get_mut("requestBody").and_then(Value::as_object_mut)
            && !is_required
        {
            body.shift_remove("required");
        }
        let responses = operation.get_mut("responses").and_then(Value::as_object_mut);
        responses
            .into_iter()
            .flatten()
            .for_each(|(status, response)| describe_error(status, response));
    }
    for (path, method, events) in STREAMS {
        document["paths"][path][method]["x-event-stream"] = events_of(method, events);
    }
    // Not among `webhooks`: for those oapi-codegen 2.8 makes code that does not compile.
    document["paths"]["/requests"]["post"]["callbacks"] =
        json!({ "lockReady": { "{$request.body#/callback_url}": { "post": lock_ready() } } });
    let refused = &mut document["paths"]["/locks"]["post"]["responses"]["409"];
    let examples = &mut refused["content"][PROBLEM_MEDIA_TYPE]["examples"];
    examples["lock_held"]["value"] = json!(refused_set());
    document
}

/// The document as a gateway serves it: requests go to that gateway, under whatever address and path
/// prefix it is reached.
pub fn served(mut document: Value) -> Value {
    document["servers"] = json!([{ "url": ".", "description": "this gateway" }]);
    document
}

/// The name of an event, and the schema of its data.
type Event = (&'static str, &'static str);

/// The operations that answer `Accept: text/event-stream` with a stream, and the events of each. For
/// `GET`, those in [`CHANGES`] follow. OpenAPI describes streams only since 3.2, which generators do not
/// read yet.
const STREAMS: [(&str, &str, &[Event]); 3] = [
    (
        "/locks/{name}",
        "post",
        &[
            ("waiting", "LockStatus"),
            ("granted", "Lease"),
            ("extended", "Lease"),
            ("unknown", "Problem"),
            ("lost", "Problem"),
            ("refused", "Problem"),
            ("end", "StreamEnd"),
        ],
    ),
    ("/locks/{name}", "get", &[("snapshot", "LockStatus")]),
    ("/locks", "get", &[("snapshot", "LockSnapshot")]),
];
/// The events of a stream that watches locks, after its `snapshot`.
const CHANGES: [Event; 8] = [
    ("held", "LockStatus"),
    ("extended", "LockStatus"),
    ("released", "LockStatus"),
    ("expired", "LockStatus"),
    ("forced", "LockStatus"),
    ("waiters", "LockStatus"),
    ("lagged", "Lagged"),
    ("end", "StreamEnd"),
];

fn events_of(method: &str, first: &[Event]) -> Value {
    let changes = if method == "get" { &CHANGES[..] } else { &[] };
    let schema = |schema: &str| json!({ "$ref": format!("#/components/schemas/{schema}") });
    let described = |event: &str, data: &str| match event {
        "waiting" => json!({
            "data": schema(data),
            "description": "The data also has `position`, the place of the request in the queue: 1 is served next.",
        }),
        _ => json!({ "data": schema(data) }),
    };
    let events = first
        .iter()
        .chain(changes)
        .map(|(event, data)| ((*event).to_owned(), described(event, data)));
    json!({ "mediaType": "text/event-stream", "events": Map::from_iter(events) })
}

/// The callback of a deferred request, which the gateway sends.
fn lock_ready() -> Value {
    let header = |name: &str, description: &str| json!({ "name": name, "in": "header", "required": true, "description": description, "schema": { "type": "string" } });
    json!({
        "operationId": "lockReady",
        "tags": ["locks"],
        "summary": "A lock is ready to be claimed",
        "description": "The gateway sends this to `callback_url`, in the form of Standard Webhooks. To claim the lock, acquire it with the `Idempotency-Key` of the request.",
        "security": [{}],
        "parameters": [
            header("webhook-id", "The same for each attempt"),
            header("webhook-timestamp", "Unix time in seconds"),
            header("webhook-signature", "Signatures by the secrets of --callback-secret-file"),
        ],
        "requestBody": {
            "required": true,
            "content": { "application/json": { "schema": { "$ref": "#/components/schemas/LockReady" } } }
        },
        "responses": { "204": { "description": "Received. Any status from 200 to 299 confirms the callback." } }
    })
}

/// The refusal of a set, which names the lock that is held. No place in line is kept for a set.
fn refused_set() -> Option<Problem> {
    let problem = error::example("409", "lock_held")?;
    let detail = "env/production: \"deploy 4710\" has held it since 2025-11-21T11:39:25.123Z; it may expire in 21400 ms";
    let held = HeldLock {
        name: "env/production".into(),
        holder: Some("deploy 4710".into()),
        expires_in_ms: problem.expires_in_ms,
    };
    Some(Problem {
        detail: detail.into(),
        holder: held.holder.clone(),
        queue_position: None,
        queue_place_expires_ms: None,
        held: Some(vec![held]),
        ..problem
    })
}

/// The properties whose value is one of a few words, with these words.
fn labels() -> [(&'static str, &'static str, Vec<&'static str>); 8] {
    let mut answers = vec!["agreed", "held", "free", "pending"];
    answers.extend(Reason::ALL.map(Reason::as_str));
    [
        ("AcquireBody", "queue", vec!["all", "newest"]),
        ("DeferBody", "queue", vec!["all", "newest"]),
        ("Problem", "code", ProblemCode::ALL.iter().map(|code| code.as_str()).collect()),
        ("Health", "status", vec!["alive", "ready", "no_quorum", "draining"]),
        ("NodeHealth", "state", NodeState::ALL.map(NodeState::as_str).to_vec()),
        ("NodeHealth", "engine", vec![Engine::Lua.as_str(), Engine::Native.as_str()]),
        ("NodeAnswer", "state", answers),
        ("StreamEnd", "reason", vec!["time", "draining", "revoked"]),
    ]
}

/// Sorts the paths, and the operations of each, by [`ORDER`].
fn ordered(paths: Value) -> Value {
    let place = |operation: &Value| ORDER.iter().position(|id| operation["operationId"] == **id);
    let Value::Object(paths) = paths else { return paths };
    let sorted = |operations: Value| {
        let Value::Object(operations) = operations else { return operations };
        let mut operations: Vec<_> = operations.into_iter().collect();
        operations.sort_by_key(|(_, operation)| place(operation));
        Value::Object(operations.into_iter().collect())
    };
    let mut paths: Vec<_> =
        paths.into_iter().map(|(path, operations)| (path, sorted(operations))).collect();
    paths.sort_by_key(|(_, operations)| {
        operations.as_object().and_then(|of| of.values().filter_map(place).min())
    });
    Value::Object(paths.into_iter().collect())
}

/// Gives an error its body, an example for each code, and the header that helps to deal with it.
fn describe_error(status: &str, response: &mut Value) {
    if !status.starts_with(['4', '5']) || response.get("content").is_some() {
        return;
    }
    let text = response["description"].as_str().unwrap_or_default();
    let labels = text.split(|c: char| !c.is_ascii_lowercase() && c != '_');
    let examples = labels.filter_map(|word| {
        Some((word.to_owned(), json!({ "value": error::example(status, word)? })))
    });
    let content = json!({ "schema": { "$ref": "#/components/schemas/Problem" }, "examples": Map::from_iter(examples) });
    let is_held = text.contains("lock_held");
    response["content"] = json!({ PROBLEM_MEDIA_TYPE: content });
    let (header, description, schema) = match status {
        "401" | "403" => {
            ("WWW-Authenticate", "Bearer and Basic, in two lines", json!({ "type": "string" }))
        }
        "409" if !is_held => return,
        "409" | "429" | "503" => (
            "Retry-After",
            "Seconds after which a retry makes sense",
            json!({ "type": "integer", "format": "int32", "minimum": 0 }),
        ),
        _ => return,
    };
    response["headers"] = json!({ header: { "description": description, "schema": schema } });
}

/// The document in OpenAPI 3.0.3. The document uses little that 3.0 lacks, so little has to change.
///
/// The answer 421 of a probe is left out, because generators for 3.0 accept one type of a success and
/// one of an error for each operation.
pub fn downgrade(document: &Value) -> Value {
    let mut twin = document.clone();
    for probe in ["/paths/~1readyz/get", "/paths/~1healthz/get"] {
        let responses = twin.pointer_mut(&format!("{probe}/responses"));
        if let Some(responses) = responses.and_then(Value::as_object_mut) {
            responses.shift_remove("421");
        }
    }
    twin["openapi"] = "3.0.3".into();
    if let Some(license) = twin.pointer_mut("/info/license").and_then(Value::as_object_mut) {
        license.shift_remove("identifier");
        license.insert("url".into(), "https://spdx.org/licenses/".into());
    }
    walk(&mut twin);
    twin
}

fn walk(value: &mut Value) {
    match value {
        Value::Object(object) => {
            downgrade_schema(object);
            object.values_mut().for_each(walk);
        }
        Value::Array(items) => items.iter_mut().for_each(walk),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn downgrade_schema(schema: &mut Map<String, Value>) {
    // 3.1 has lists of examples and types; 3.0 has one example and one type.
    if let Some(Value::Array(examples)) = schema.get("examples")
        && let Some(first) = examples.first().cloned()
    {
        schema.shift_remove("examples");
        schema.insert("example".into(), first);
    }
    if let Some(Value::Array(types)) = schema.get("type") {
        let first = types.iter().find(|kind| kind.as_str() != Some("null")).cloned();
        if let Some(first) = first {
            schema.insert("type".into(), first);
        }
    }
    schema.shift_remove("propertyNames");
    // 3.0 ignores everything beside a reference, and some tools refuse it.
    if schema.get("$ref").is_some_and(Value::is_string) {
        schema.retain(|key, _| key == "$ref");
    }
}
