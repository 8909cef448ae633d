//! The keys of a master, as the rules see them.

use std::ffi::c_longlong;

use bytes::Bytes;
use redlock_core::node::rules::{Expiry, KeyError, KeySpace};

use crate::api::{Call, CallingUser, Ends, OwnText};

pub(crate) struct Space<'a> {
    call: &'a Call<'a>,
    user: Option<CallingUser<'a>>,
    now_micros: u64,
    is_out_of_memory: bool,
    /// Whether this operation has given memory back, or changed an expiry: then it may write on, as a script may that has
    /// written. An operation that is cut off between its writes would be worse than a few bytes.
    has_written: bool,
}

impl<'a> Space<'a> {
    pub(crate) fn new(call: &'a Call<'a>, now_micros: u64) -> Self {
        let is_out_of_memory = call.is_out_of_memory();
        Self { call, user: call.user(), now_micros, is_out_of_memory, has_written: false }
    }

    /// Each operation stands alone.
    pub(crate) fn next_operation(&mut self) {
        self.has_written = false;
    }

    pub(crate) fn publish(&self, channel: &[u8], message: &[u8]) {
        if self.user.as_ref().is_none_or(|user| user.may_publish(channel)) {
            self.call.publish(channel, message);
        }
    }

    /// The name of a key that the caller may use.
    fn name(&self, key: &[u8]) -> Result<OwnText<'a>, KeyError> {
        let name = self.call.text(key);
        let is_allowed = self.user.as_ref().is_none_or(|user| user.may_use(&name));
        if is_allowed { Ok(name) } else { Err(KeyError::Forbidden) }
    }
}

fn signed(millis: u64) -> c_longlong {
    c_longlong::try_from(millis).unwrap_or(c_longlong::MAX / 2)
}

impl KeySpace for Space<'_> {
    fn now_micros(&self) -> u64 {
        self.now_micros
    }

    fn get(&mut self, key: &Bytes) -> Result<Option<Bytes>, KeyError> {
        let name = self.name(key)?;
        match self.call.read(&name) {
            Some(key) => key.value().map_err(|_| KeyError::WrongType),
            None => Ok(None),
        }
    }

    fn time_to_live(&mut self, key: &Bytes) -> Option<u64> {
        self.call.read(&self.name(key).ok()?)?.time_to_live()
    }

    fn set(&mut self, key: &Bytes, value: Bytes, expiry: Expiry) -> Result<(), KeyError> {
        if self.is_out_of_memory && !self.has_written {
            return Err(KeyError::OutOfMemory);
        }
        let name = self.name(key)?;
        let Some(key) = self.call.write(&name) else { return Err(KeyError::WrongType) };
        let ends = match expiry {
            Expiry::In(millis) => Ends::In(signed(millis)),
            Expiry::Keep => match key.ends_at() {
                at if at >= 0 => Ends::At(at),
                _ => Ends::Never,
            },
            Expiry::Never => Ends::Never,
        };
        key.set(&value, ends);
        self.has_written = true;
        Ok(())
    }

    fn expire(&mut self, key: &Bytes, millis: u64) {
        if let Ok(name) = self.name(key)
            && let Some(key) = self.call.write(&name)
        {
            key.expire_in(signed(millis));
            self.has_written = true;
        }
    }

    fn delete(&mut self, key: &Bytes) {
        if let Ok(name) = self.name(key)
            && let Some(key) = self.call.write(&name)
        {
            key.delete();
            self.has_written = true;
        }
    }
}
