//! The rules of locks as a native Redis command, which does the work of `node/locks.lua`. The
//! command runs `node/rules.rs`, as embedded and simulated nodes do, but on the server's keys. The
//! module makes masters faster and promises nothing else.
//!
//! Load it with `redis-server --loadmodule libredlock_module.so`, or `MODULE LOAD`. A gateway tries
//! the command whenever it connects. If a master lacks the command, or has another version of it,
//! the gateway uses Lua with that master. So a cluster may have masters with and without the
//! module.
//!
//! `REDLOCK.CALL <run_id> <call>` returns an answer. `node/codec.rs` defines the formats of the
//! call and of the answer. If the run_id is not that of this server process, or the call has
//! another version, the command runs nothing and returns `NOSCRIPT`.
//!
//! Locks are ordinary keys, seen by every client. Changes go to the append-only file and to
//! replicas as plain `SET`, `DEL` and `PEXPIREAT`, so a server without the module loads and follows
//! them.
//!
//! The caller must be a client whose user is in the ACL table. The keys and the channel of hints
//! are checked against that user. Every other caller is refused: a script, another module, or a
//! client whose user a module made. The user is found by its name, so a module must not give its
//! own user the name of one in the table.

mod api;
mod space;

use std::ffi::{CStr, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use redlock_core::node::codec::{self, AnswerPacker, Malformed};
use redlock_core::node::rules::{self, Expiry, KeySpace};

use crate::api::{Call, RawContext, Server, Text};
use crate::space::Space;

struct Module {
    server: Server,
    run_id: Vec<u8>,
}

static MODULE: OnceLock<Module> = OnceLock::new();

/// Called by the server when it loads the module.
///
/// # Safety
/// Only the server may call this, with a context of its own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn RedisModule_OnLoad(ctx: *mut RawContext, _: *mut Text, _: c_int) -> c_int {
    // SAFETY: guaranteed by the caller.
    let joined = unsafe {
        let Some(server) = Server::join(ctx, c"redlock", c_int::from(codec::VERSION)) else {
            return api::ERR;
        };
        let Some(run_id) = server.run_id(ctx) else { return api::ERR };
        // The flag `deny-oom` is left out, so that releases run even if the server is out of
        // memory. Acquires are then refused one by one. The flag is `deny-script`, because scripts
        // have no user.
        let joined = server.add_command(ctx, c"redlock.call", call, c"write deny-script");
        // If an earlier load failed and the system kept the library in memory, `MODULE` is already
        // set. Its value is still right, because the process is the same.
        drop(MODULE.set(Module { server, run_id }));
        joined
    };
    if joined { api::OK } else { api::ERR }
}

/// Called by the server before it unloads the module. The error keeps the module loaded.
///
/// Each connection keeps a pointer to the last command that it ran. Unloading frees that command.
/// Redis 8.2.3 crashes when such a connection uses the command again. Redis 7 reads the freed
/// memory for `CLIENT LIST` (redis/redis#10259).
#[unsafe(no_mangle)]
pub extern "C" fn RedisModule_OnUnload(_: *mut RawContext) -> c_int {
    api::ERR
}

unsafe extern "C" fn call(ctx: *mut RawContext, arguments: *mut Text, count: c_int) -> c_int {
    let Some(module) = MODULE.get() else { return api::ERR };
    // SAFETY: Redis passes them to this call.
    let call = unsafe { module.server.call(ctx, arguments, count) };
    // A panic must not unwind into the server. No case of a panic is known.
    match catch_unwind(AssertUnwindSafe(|| answer(&call, &module.run_id))) {
        Ok(Ok(answer)) => call.reply(&answer),
        Ok(Err(refusal)) => call.reply_error(refusal),
        Err(_) => call.reply_error(c"ERR redlock: an internal error of the module"),
    }
}

/// Runs the operations of a call, after all of it was decoded.
fn answer(call: &Call<'_>, run_id: &[u8]) -> Result<Vec<u8>, &'static CStr> {
    let (Some(for_process), Some(codec)) = (call.argument(1), call.argument(2)) else {
        return Err(c"ERR wrong number of arguments for 'redlock.call' command");
    };
    let user = call.user().ok_or(c"NOPERM redlock: the caller is not a client with an ACL user")?;
    if for_process != run_id {
        return Err(c"NOSCRIPT redlock: the call is for another process");
    }
    let request =
        codec::unpack_call(Bytes::copy_from_slice(codec)).map_err(|malformed| match malformed {
            Malformed::Version(_) => c"NOSCRIPT redlock: the call has another version",
            Malformed::Call => c"ERR the call is malformed",
        })?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now_micros = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
    let mut space = Space::new(call, user, now_micros);
    // The marker of a call has no configuration in front, so it stays the same when an operator
    // raises the bounds there.
    let names = |stored: &Bytes| !request.marker.is_empty() && stored.ends_with(&request.marker);
    let marker = space.get(&request.marker_key).ok().flatten().filter(names);
    let admitted = marker.is_some();
    let mut answer = AnswerPacker::new(now_micros, admitted);
    if request.ops.is_empty() {
        // A call without operations writes the present marker once more, to report whether this
        // master takes writes.
        let set =
            marker.map_or(Ok(()), |marker| space.set(&request.marker_key, marker, Expiry::Never));
        answer.write_error(&set.err().map(|error| error.to_string()).unwrap_or_default());
    }
    space.end_operation();
    let mut is_yes = request.ops.is_empty();
    for op in &request.ops {
        let vote = rules::run(&mut space, &request.settings, admitted, op);
        space.end_operation();
        if let Some(hint) = op.hint_for(&vote) {
            space.publish(&request.channel, hint.as_bytes());
        }
        is_yes |= vote.is_yes();
        answer.vote(&vote);
    }
    if admitted && request.number > 0 && is_yes {
        let number = Bytes::from(request.number.to_string());
        let kept = Expiry::In(codec::NUMBER_KEPT_MS);
        if space.set(&request.number_key, number, kept).is_ok() {
            answer.number_kept();
        }
        space.end_operation();
    }
    Ok(answer.finish())
}
