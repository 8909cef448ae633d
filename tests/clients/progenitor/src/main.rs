//! A session with a gateway, through the client that progenitor generates from the OpenAPI
//! document. The only argument is the gateway's URL.

use std::error::Error as StdError;

use futures_util::TryStreamExt;

progenitor::generate_api!(
    spec = "../../../openapi/openapi-3.0.json",
    interface = Builder,
    tags = Merged
);

use types::{AcquireBodyOwner, LockState, Problem, ProblemCode};

const NAME: &str = "reports/nightly";

/// The problem in the answer to a call that the gateway refuses. The generated code parses only
/// `application/json`. A problem is `application/problem+json`, so that code leaves the body as a
/// stream.
async fn refused<T>(
    answer: Result<ResponseValue<T>, Error<ByteStream>>,
) -> Result<(u16, Problem), Box<dyn StdError>> {
    let refusal = match answer {
        Err(Error::ErrorResponse(refusal)) => refusal,
        Err(other) => return Err(other.to_string().into()),
        Ok(_) => return Err("this call should have been refused".into()),
    };
    let status = refusal.status().as_u16();
    let mut body = Vec::new();
    let mut stream = refusal.into_inner_stream();
    while let Some(piece) = stream.try_next().await? {
        body.extend_from_slice(&piece);
    }
    Ok((status, serde_json::from_slice(&body)?))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn StdError>> {
    let url = std::env::args().nth(1).ok_or("give the URL of a gateway")?;
    let client = Client::new(&url);

    let owner = AcquireBodyOwner::try_from("Zoë on host-7")?;
    let lease = client
        .acquire_lock()
        .name(NAME)
        .body_map(|body| body.ttl_ms(30_000).owner(owner))
        .send()
        .await?;
    assert_eq!((lease.status().as_u16(), lease.name.as_str()), (201, NAME));
    assert_eq!(lease.headers()["lock-token"], lease.token);
    assert_eq!(lease.headers()["location"], "/locks/reports%2Fnightly");
    assert!(lease.validity_ms > 0 && lease.fencing_token > 0, "{lease:?}");
    println!("progenitor: acquired {}, fencing token {}", lease.name, lease.fencing_token);
    let token = lease.token.as_str();

    let (status, held) = refused(client.acquire_lock().name(NAME).send().await).await?;
    assert_eq!(
        (status, held.code, held.holder.as_deref()),
        (409, ProblemCode::LockHeld, Some("Zoë on host-7"))
    );
    assert!(held.retry_after_ms.is_some() && held.expires_in_ms.is_some(), "{held:?}");
    println!("progenitor: conflict: {} by {}", held.code, held.holder.unwrap_or_default());

    let status = client.get_lock().name(NAME).send().await?;
    assert_eq!((status.state, status.fencing_token), (LockState::Held, Some(lease.fencing_token)));
    println!("progenitor: looked: {}", status.state);

    let longer = client
        .extend_lock()
        .name(NAME)
        .lock_token(token)
        .body_map(|body| body.ttl_ms(60_000))
        .send()
        .await?;
    assert_eq!((longer.ttl_ms, longer.fencing_token), (60_000, lease.fencing_token));
    println!("progenitor: extended to {} ms", longer.ttl_ms);

    let released = client.release_lock().name(NAME).lock_token(token).send().await?;
    assert_eq!(released.status().as_u16(), 204);
    println!("progenitor: released");

    let (status, gone) =
        refused(client.release_lock().name(NAME).lock_token(token).send().await).await?;
    assert_eq!((status, gone.code), (404, ProblemCode::LockNotFound));
    println!("progenitor: released again: {}", gone.code);

    let key = "progenitor-request-1";
    let names = vec![NAME.parse()?];
    let create = client.create_request().idempotency_key(key);
    let request = create.body_map(|body| body.names(names)).send().await?;
    assert_eq!(request.status().as_u16(), 202);
    assert_eq!(request.headers()["location"], format!("/requests/{}", request.id));
    let state =
        async || client.get_request().id(&request.id).send().await.map(|now| now.state.clone());
    assert_eq!((&*request.state, &*state().await?), ("ready", "ready"));
    println!("progenitor: request {} for {:?}", request.state, request.names);

    let claimed = client.acquire_lock().name(NAME).idempotency_key(key).send().await?;
    assert_eq!(state().await?, "claimed");
    client.release_lock().name(NAME).lock_token(claimed.token.as_str()).send().await?;
    println!("progenitor: claimed and released {}", claimed.name);
    Ok(())
}
