//! The layers around the routes, without a server.

#![cfg(test)]

use parking_lot::Mutex;
use std::io::Write;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use axum::body::to_bytes;
use serde_json::Value;

use super::*;
use crate::auth::AuthError;
use crate::overload::clients::Clients;
use crate::transport::connections::{ConnectionLimits, Connections};
use crate::transport::disconnect::SharedStream;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn poll<T>(future: Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Captures log lines of level info until the guard is dropped.
fn logged() -> (Log, tracing::subscriber::DefaultGuard) {
    let log = Log::default();
    let to_log = log.clone();
    let subscriber =
        tracing_subscriber::fmt().json().flatten_event(true).with_writer(move || to_log.clone());
    (log, tracing::subscriber::set_default(subscriber.finish()))
}

impl Log {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().clone()).unwrap()
    }
}

/// An app whose fair queue makes every client wait as soon as there are two clients.
fn app(routes: Router, has_keys: bool) -> App {
    let mut labels = matchit::Router::new();
    labels.insert("/{path}", "a label".to_owned()).unwrap();
    let telemetry = Arc::new(Telemetry::new(&[]));
    let audit = Arc::new(Audit::logged());
    let observer =
        Observer::new(labels, telemetry, audit, has_keys, Hosts::default(), FairQueue::new(0));
    App::observed(routes, observer)
}

async fn peer(clients: Arc<Clients>) -> Peer {
    let limit = ConnectionLimits::of_all(1);
    let metrics = Telemetry::new(&[]).connections;
    let place = Connections::new(limit, clients, Arc::default(), metrics)
        .enter([127, 0, 0, 1].into())
        .await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    SharedStream::new(stream, place.unwrap()).unwrap().1
}

#[tokio::test]
async fn a_refusal_is_recorded_before_its_turn_in_the_queue() {
    let (log, _subscribed) = logged();
    let app = app(
        Router::new().route("/refused", get(async || ApiError::from(AuthError::Unknown))),
        true,
    );
    let clients = Arc::<Clients>::default();
    let fair_queue = app.observer.fair_queue.clone();
    fair_queue.take(&clients.unknown().queue, false).await;
    let peer = peer(clients).await;
    let request =
        Request::get("/refused").extension(peer).header("host", "a").body(Body::empty()).unwrap();
    assert!(poll(pin!(app.answer(request))).is_pending(), "it waits in the queue");
    let text = log.text();
    assert!(
        text.contains("\"request refused\"")
            && text.contains("\"status\":401")
            && text.contains("\"audit\""),
        "{text}"
    );
}

#[tokio::test]
async fn the_log_has_the_cause_of_an_internal_error_by_request_id() {
    let (log, _subscribed) = logged();
    let routes = Router::new()
        .route("/error", get(async || ApiError::internal("the cause")))
        .route("/panic", get(async || -> () { panic!("what {}", "happened") }));
    let app = app(routes, false);
    for (path, cause) in [("/error", "the cause"), ("/panic", "panic: what happened")] {
        let request = Request::get(path).header("host", "a").body(Body::empty()).unwrap();
        let response = app.clone().answer(request).await;
        assert_eq!(response.status(), 500);
        let id = response.headers()["x-request-id"].to_str().unwrap().to_owned();
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        let problem: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            (&problem["code"], &problem["request_id"]),
            (&"internal_error".into(), &id.as_str().into())
        );
        assert!(!problem.to_string().contains(cause), "it is for the log only: {problem}");
        let text = log.text();
        let line = text.lines().find(|line| line.contains(&id)).expect("a line with the id");
        let line: Value = serde_json::from_str(line).unwrap();
        assert_eq!(
            (&line["level"], &line["cause"], &line["route"]),
            (&"ERROR".into(), &cause.into(), &"a label".into())
        );
    }
}
