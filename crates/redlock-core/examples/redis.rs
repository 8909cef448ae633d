//! A job that must not run twice at once, on real masters.
//!
//!     cargo run -p redlock-core --example redis -- redis://10.0.0.1 redis://10.0.0.2 redis://10.0.0.3
//!
//! Pass --bootstrap the first time. Without it, new masters wait for 5 minutes before they vote,
//! because they look like masters that lost everything.

use std::error::Error;
use std::time::Duration;

use redlock_core::{
    AcquireOptions, Bootstrap, FencingToken, Info, LockError, LockName, Redlock, Ttl,
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (flags, urls): (Vec<_>, Vec<_>) =
        std::env::args().skip(1).partition(|arg| arg == "--bootstrap");
    let is_new = !flags.is_empty();
    // Errors never show the password in an address.
    let locks = Redlock::builder().redis(urls).expecting_bootstrap(is_new).connect()?;
    if is_new && let Bootstrap::Refuted(node) = locks.bootstrap().await {
        println!("{node} is not new");
    }
    if tokio::time::timeout(Duration::from_secs(10), locks.ready()).await.is_err() {
        for (node, status) in locks.nodes() {
            let status = status.borrow();
            println!("{node}: {}: {}", status.state.as_str(), status.detail);
        }
        return Err("no majority of the masters votes".into());
    }

    let name = "reports/nightly".parse::<LockName>()?;
    let ttl = Ttl::from_millis(30_000)?;
    let options =
        AcquireOptions { info: Info::new("the nightly report")?, ..AcquireOptions::default() };
    let mut guard = match locks.lock(&name, ttl, options, Duration::from_secs(5)).await {
        Ok(guard) => guard,
        Err(LockError::Held(by)) => {
            println!("held by {:?}: it does the work", String::from_utf8_lossy(&by.info));
            return Ok(());
        }
        // Nothing is held and nothing is left behind, so a retry is safe.
        Err(error) => return Err(error.into()),
    };
    println!("acquired with fencing token {}", guard.fencing_token());

    for page in 1..=3 {
        // The resource refuses smaller tokens than it has seen. That stops a holder that slept
        // through its deadline.
        write(page, guard.fencing_token());
        match guard.extend(ttl).await {
            Ok(()) => println!("extended"),
            // Too few masters answered to tell whether the lock was extended. The earlier deadline
            // still counts.
            Err(LockError::Unknown(_)) if guard.validity() > Some(Duration::from_secs(10)) => {
                println!("unknown: go on")
            }
            // Somebody else may be writing by now.
            Err(error) => return Err(error.into()),
        }
    }

    match guard.release().await {
        Ok(()) => println!("released"),
        // The work is done, so a lock that has expired by now does no harm.
        Err(error) => println!("not released: {error}"),
    }
    Ok(())
}

fn write(page: u32, token: FencingToken) {
    println!("UPDATE report SET page = {page}, fence = {token} WHERE id = 1 AND fence <= {token}");
}
