//! The keys of a master, as [`rules`](redlock_core::node::rules) use them.

use std::ffi::c_longlong;

use bytes::Bytes;
use redlock_core::node::rules::{Expiry, KeyError, KeySpace};

use crate::api::{Call, CallingUser, Changes, NO_EXPIRY, OpenKey, OwnText};

pub(crate) struct Space<'a> {
    call: &'a Call<'a>,
    user: CallingUser<'a>,
    now_micros: u64,
    is_out_of_memory: bool,
    /// Whether this operation has already written, deleted or changed an expiry. Then it may go on
    /// writing even if the server is out of memory, as Redis allows a script that has written. An
    /// operation cut off between its writes would do more harm than a few more bytes.
    has_written: bool,
    /// The open keys of this operation: a lock and its token watermark. Each key is opened, and the
    /// caller's permission checked, once.
    open: [Option<(Bytes, OpenKey<'a>)>; 2],
}

impl<'a> Space<'a> {
    pub(crate) fn new(call: &'a Call<'a>, user: CallingUser<'a>, now_micros: u64) -> Self {
        let is_out_of_memory = call.is_out_of_memory();
        Self { call, user, now_micros, is_out_of_memory, has_written: false, open: [None, None] }
    }

    /// Closes the operation's keys and publishes their changes. Operations are independent.
    pub(crate) fn end_operation(&mut self) {
        self.has_written = false;
        let closed = std::mem::take(&mut self.open).map(|slot| slot.map(|(_, key)| key.close()));
        closed.iter().flatten().for_each(Changes::tell);
    }

    pub(crate) fn publish(&self, channel: &[u8], message: &[u8]) {
        if self.user.may_publish(channel) {
            self.call.publish(channel, message);
        }
    }

    /// Opens a key that the caller may use.
    fn key(&mut self, name: &Bytes) -> Result<&mut OpenKey<'a>, KeyError> {
        let is_named = |slot: &Option<(Bytes, OpenKey<'_>)>| {
            slot.as_ref().is_some_and(|(open_name, _)| open_name == name)
        };
        let at = match self.open.iter().position(is_named) {
            Some(at) => at,
            None => {
                let opened = self.call.open(self.allowed(name)?).ok_or(KeyError::WrongType)?;
                let at = self.open.iter().position(Option::is_none).unwrap_or_default();
                self.open[at] = Some((name.clone(), opened));
                at
            }
        };
        self.open[at].as_mut().map(|(_, key)| key).ok_or(KeyError::WrongType)
    }

    fn allowed(&self, name: &[u8]) -> Result<OwnText<'a>, KeyError> {
        let name = self.call.text(name);
        if self.user.may_use(&name) { Ok(name) } else { Err(KeyError::Forbidden) }
    }

    /// Now plus `millis`, in milliseconds since 1970.
    fn expiry_after(&self, millis: u64) -> c_longlong {
        c_longlong::try_from((self.now_micros / 1_000).saturating_add(millis))
            .unwrap_or(c_longlong::MAX / 2)
    }
}

impl KeySpace for Space<'_> {
    fn now_micros(&self) -> u64 {
        self.now_micros
    }

    fn get(&mut self, key: &Bytes) -> Result<Option<Bytes>, KeyError> {
        self.key(key)?.value().map_err(|_| KeyError::WrongType)
    }

    fn time_to_live(&mut self, key: &Bytes) -> Option<u64> {
        self.key(key).ok()?.time_to_live()
    }

    fn set(&mut self, key: &Bytes, value: Bytes, expiry: Expiry) -> Result<(), KeyError> {
        if self.is_out_of_memory && !self.has_written {
            return Err(KeyError::OutOfMemory);
        }
        let ends_at = match expiry {
            Expiry::In(millis) => Some(self.expiry_after(millis)),
            Expiry::Never => Some(NO_EXPIRY),
            Expiry::Keep => None,
        };
        self.key(key)?.set(&value, ends_at);
        self.has_written = true;
        Ok(())
    }

    fn expire(&mut self, key: &Bytes, millis: u64) {
        let at = self.expiry_after(millis);
        if let Ok(key) = self.key(key) {
            key.expire_at(at);
            self.has_written = true;
        }
    }

    fn delete(&mut self, key: &Bytes) {
        if let Ok(key) = self.key(key) {
            key.delete();
            self.has_written = true;
        }
    }
}
