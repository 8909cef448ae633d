//! Locks within one process, on masters inside it: to try the library, or to test code that uses
//! it.
//!
//!     cargo run -p redlock-core --example embedded

use std::error::Error;
use std::time::Duration;

use redlock_core::{AcquireOptions, LockError, LockGuard, LockName, Redlock, Ttl};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let locks = Redlock::builder().embedded(5).connect()?;
    let name = "reports/nightly".parse::<LockName>()?;
    let ttl = Ttl::from_millis(10_000)?;

    let mut report = lock(&locks, &name, ttl, Duration::ZERO).await?;
    println!("acquired with fencing token {}", report.fencing_token());

    // Nobody else gets the lock, however often they ask.
    match lock(&locks, &name, ttl, Duration::ZERO).await {
        Err(LockError::Held(by)) => println!("held: free in {:?} at the earliest", by.expires_in),
        Err(other) => return Err(other.into()),
        Ok(_) => return Err("two holders at once".into()),
    }

    // A third of the TTL is a good interval.
    report.extend(ttl).await?;
    println!("extended: may be trusted for {:?}", report.validity());

    // A waiter gets the lock as soon as it is released. Dropping a guard releases too, in the
    // background.
    let waiter = lock(&locks, &name, ttl, Duration::from_secs(5));
    let (next, released) = tokio::join!(waiter, report.release());
    released?;
    let mut next = next?;
    println!("handed over with fencing token {}", next.fencing_token());

    // An operator releases the lock by force. The holder finds out here, and the resource by the
    // next holder's larger token.
    locks.force_release(&name, |_| ()).await?;
    match next.extend(ttl).await {
        Err(LockError::Lost | LockError::NotHolder(_)) => println!("lost: stop work"),
        Err(LockError::Unknown(_)) => println!("unknown: the old deadline stands, try again"),
        other => return Err(format!("not expected: {other:?}").into()),
    }
    Ok(())
}

async fn lock(
    locks: &Redlock,
    name: &LockName,
    ttl: Ttl,
    patience: Duration,
) -> Result<LockGuard, LockError> {
    locks.lock(name, ttl, AcquireOptions::default(), patience).await
}
