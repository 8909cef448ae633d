//! Safe wrappers for the functions of Redis' module interface that this crate uses, declared as in
//! `redismodule.h`. Only this file calls them.
//!
//! The functions are declared by hand. The interface is a C ABI that Redis has kept since 4.0, and
//! this crate needs only about thirty of its functions. A generator of bindings would need libclang
//! wherever the workspace is built.

use std::ffi::{CStr, c_char, c_int, c_longlong, c_ulonglong, c_void};
use std::ptr::NonNull;

use bytes::Bytes;

pub(crate) const OK: c_int = 0;
pub(crate) const ERR: c_int = 1;
const READ: c_int = 1;
const WRITE: c_int = 2;
const KEY_IS_EMPTY: c_int = 0;
const KEY_IS_TEXT: c_int = 1;
/// The value that means "no expiry".
pub(crate) const NO_EXPIRY: c_longlong = -1;
const FLAG_OUT_OF_MEMORY: c_int = 1 << 10;
/// Permissions to access, update, insert and delete.
const MAY_READ_AND_WRITE: c_int = 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7;
/// This module opens keys for writing even where it only reads them. Without this option, Redis
/// would notify clients that WATCH such a key, although nothing changed.
const OPTION_NO_IMPLICIT_SIGNAL: c_int = 1 << 1;
const EVENT_GENERIC: c_int = 1 << 2;
const EVENT_TEXT: c_int = 1 << 3;

/// The context that Redis passes to a call.
#[repr(C)]
pub struct RawContext {
    get_api: *mut c_void,
}

type Ctx = *mut RawContext;
pub(crate) type Text = *mut c_void;
type Key = *mut c_void;
type User = *mut c_void;
type Info = *mut c_void;
type Command = unsafe extern "C" fn(Ctx, *mut Text, c_int) -> c_int;

macro_rules! functions {
    ($($name:ident($($argument:ty),*) $(-> $answer:ty)?;)*) => {
        /// The addresses of the functions in this process.
        #[allow(non_snake_case)]
        struct Functions {
            Replicate: unsafe extern "C" fn(Ctx, *const c_char, *const c_char, ...) -> c_int,
            $($name: unsafe extern "C" fn($($argument),*) $(-> $answer)?,)*
        }

        impl Functions {
            /// Finds the functions; `None` when the server is too old for one of them.
            ///
            /// # Safety
            /// The server must have given this context.
            unsafe fn find(ctx: Ctx) -> Option<Self> {
                type Get = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
                // SAFETY: a context begins with the address of this function.
                let get: Get = unsafe { std::mem::transmute((*ctx).get_api) };
                let find = |name: &CStr| {
                    let mut found = std::ptr::null_mut();
                    // SAFETY: the function writes an address, or nothing.
                    let status = unsafe { get(name.as_ptr(), &mut found) };
                    (status == OK && !found.is_null()).then_some(found)
                };
                let name = |name: &str| std::ffi::CString::new(format!("RedisModule_{name}")).ok();
                // SAFETY: the types are those of redismodule.h.
                #[allow(clippy::missing_transmute_annotations)]
                unsafe {
                    Some(Self {
                        Replicate: std::mem::transmute(find(&name("Replicate")?)?),
                        $($name: std::mem::transmute(find(&name(stringify!($name))?)?),)*
                    })
                }
            }
        }
    };
}

functions! {
    SetModuleAttribs(Ctx, *const c_char, c_int, c_int);
    SetModuleOptions(Ctx, c_int);
    IsModuleNameBusy(*const c_char) -> c_int;
    CreateCommand(Ctx, *const c_char, Command, *const c_char, c_int, c_int, c_int) -> c_int;
    StringPtrLen(Text, *mut usize) -> *const c_char;
    CreateString(Ctx, *const c_char, usize) -> Text;
    FreeString(Ctx, Text);
    OpenKey(Ctx, Text, c_int) -> Key;
    CloseKey(Key);
    KeyType(Key) -> c_int;
    StringDMA(Key, *mut usize, c_int) -> *const c_char;
    StringSet(Key, Text) -> c_int;
    StringTruncate(Key, usize) -> c_int;
    GetExpire(Key) -> c_longlong;
    GetAbsExpire(Key) -> c_longlong;
    SetAbsExpire(Key, c_longlong) -> c_int;
    DeleteKey(Key) -> c_int;
    ReplyWithStringBuffer(Ctx, *const c_char, usize) -> c_int;
    ReplyWithError(Ctx, *const c_char) -> c_int;
    PublishMessage(Ctx, Text, Text) -> c_int;
    GetContextFlags(Ctx) -> c_int;
    GetServerInfo(Ctx, *const c_char) -> Info;
    FreeServerInfo(Ctx, Info);
    ServerInfoGetFieldC(Info, *const c_char) -> *const c_char;
    GetClientId(Ctx) -> c_ulonglong;
    GetClientUserNameById(Ctx, c_ulonglong) -> Text;
    GetModuleUserFromUserName(Text) -> User;
    FreeModuleUser(User);
    ACLCheckKeyPermissions(User, Text, c_int) -> c_int;
    ACLCheckChannelPermissions(User, Text, c_int) -> c_int;
    NotifyKeyspaceEvent(Ctx, c_int, *const c_char, Text) -> c_int;
    SignalModifiedKey(Ctx, Text) -> c_int;
}

/// The server that has loaded the module.
pub(crate) struct Server(Functions);

impl Server {
    /// Registers the module; `None` when the server is too old, or has loaded it already.
    ///
    /// # Safety
    /// The context must be that of `RedisModule_OnLoad`.
    pub(crate) unsafe fn join(ctx: Ctx, name: &CStr, version: c_int) -> Option<Self> {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let functions = Functions::find(ctx)?;
            if (functions.IsModuleNameBusy)(name.as_ptr()) != 0 {
                return None;
            }
            (functions.SetModuleAttribs)(ctx, name.as_ptr(), version, 1);
            (functions.SetModuleOptions)(ctx, OPTION_NO_IMPLICIT_SIGNAL);
            Some(Self(functions))
        }
    }

    /// Adds a command. Redis finds no keys among its arguments, because the keys are encoded inside
    /// an argument.
    ///
    /// # Safety
    /// The context must be that of `RedisModule_OnLoad`.
    pub(crate) unsafe fn add_command(
        &self,
        ctx: Ctx,
        name: &CStr,
        run: Command,
        flags: &CStr,
    ) -> bool {
        // SAFETY: guaranteed by the caller; Redis copies both texts.
        unsafe { (self.0.CreateCommand)(ctx, name.as_ptr(), run, flags.as_ptr(), 0, 0, 0) == OK }
    }

    /// The run_id, which distinguishes this server process from earlier and later processes of the
    /// same master.
    ///
    /// # Safety
    /// The server must have given this context.
    pub(crate) unsafe fn run_id(&self, ctx: Ctx) -> Option<Vec<u8>> {
        // SAFETY: guaranteed by the caller; `info` owns the field until it is freed.
        unsafe {
            let info = NonNull::new((self.0.GetServerInfo)(ctx, c"server".as_ptr()))?;
            let field = (self.0.ServerInfoGetFieldC)(info.as_ptr(), c"run_id".as_ptr());
            let field = (!field.is_null()).then(|| CStr::from_ptr(field).to_bytes().to_vec());
            (self.0.FreeServerInfo)(ctx, info.as_ptr());
            field
        }
    }

    /// Wraps one call of a command.
    ///
    /// # Safety
    /// Context and arguments must be those that Redis passed to this call.
    pub(crate) unsafe fn call(&self, ctx: Ctx, arguments: *mut Text, count: c_int) -> Call<'_> {
        // SAFETY: guaranteed by the caller.
        let arguments = unsafe {
            std::slice::from_raw_parts(arguments, usize::try_from(count).unwrap_or_default())
        };
        Call { functions: &self.0, ctx, arguments }
    }
}

/// One call of a command. Nothing else runs on the server until it returns.
pub(crate) struct Call<'a> {
    functions: &'a Functions,
    ctx: Ctx,
    arguments: &'a [Text],
}

// SAFETY of the calls below: the context lives as long as the call. Every text, key and user that
// is made here is freed by its owner's Drop. Data that Redis lends from a key is copied before the
// key is closed.
impl Call<'_> {
    /// Returns an argument; the first is the name of the command.
    pub(crate) fn argument(&self, at: usize) -> Option<&[u8]> {
        let text = *self.arguments.get(at)?;
        let mut length = 0;
        // SAFETY: arguments outlive the call.
        unsafe {
            let bytes = (self.functions.StringPtrLen)(text, &mut length);
            Some(std::slice::from_raw_parts(bytes.cast(), length))
        }
    }

    pub(crate) fn is_out_of_memory(&self) -> bool {
        // SAFETY: see above.
        unsafe { (self.functions.GetContextFlags)(self.ctx) & FLAG_OUT_OF_MEMORY != 0 }
    }

    pub(crate) fn reply(&self, answer: &[u8]) -> c_int {
        // SAFETY: Redis copies the bytes.
        unsafe {
            (self.functions.ReplyWithStringBuffer)(self.ctx, answer.as_ptr().cast(), answer.len())
        }
    }

    pub(crate) fn reply_error(&self, error: &CStr) -> c_int {
        // SAFETY: Redis copies the bytes.
        unsafe { (self.functions.ReplyWithError)(self.ctx, error.as_ptr()) }
    }

    pub(crate) fn publish(&self, channel: &[u8], message: &[u8]) {
        let channel = self.text(channel);
        let message = self.text(message);
        // SAFETY: see above.
        unsafe { (self.functions.PublishMessage)(self.ctx, channel.text, message.text) };
    }

    /// The user whose permissions count. `None` for a caller that is no client, as another module
    /// may be, and for a client whose user is not in the ACL table. The user is looked up by the
    /// client's id, because Redis 7.0 crashes when asked for the user name of a caller without a
    /// user.
    pub(crate) fn user(&self) -> Option<CallingUser<'_>> {
        // SAFETY: see above.
        unsafe {
            let client = (self.functions.GetClientId)(self.ctx);
            let name = NonNull::new((self.functions.GetClientUserNameById)(self.ctx, client))?;
            let user = (self.functions.GetModuleUserFromUserName)(name.as_ptr());
            (self.functions.FreeString)(self.ctx, name.as_ptr());
            NonNull::new(user).map(|user| CallingUser { call: self, user })
        }
    }

    pub(crate) fn text(&self, bytes: &[u8]) -> OwnText<'_> {
        // SAFETY: Redis copies the bytes.
        let text =
            unsafe { (self.functions.CreateString)(self.ctx, bytes.as_ptr().cast(), bytes.len()) };
        OwnText { call: self, text }
    }

    /// Opens a key, whether it exists or not. `None` when the server refuses.
    pub(crate) fn open<'a>(&'a self, name: OwnText<'a>) -> Option<OpenKey<'a>> {
        // SAFETY: see above.
        let key =
            NonNull::new(unsafe { (self.functions.OpenKey)(self.ctx, name.text, READ | WRITE) })?;
        Some(OpenKey { key: Handle { call: self, key }, name, changes: Vec::new() })
    }
}

/// A Redis string that this module owns.
pub(crate) struct OwnText<'a> {
    call: &'a Call<'a>,
    text: Text,
}

impl Drop for OwnText<'_> {
    fn drop(&mut self) {
        // SAFETY: made by this module; Redis counts its own references.
        unsafe { (self.call.functions.FreeString)(self.call.ctx, self.text) };
    }
}

pub(crate) struct CallingUser<'a> {
    call: &'a Call<'a>,
    user: NonNull<c_void>,
}

impl CallingUser<'_> {
    pub(crate) fn may_use(&self, key: &OwnText<'_>) -> bool {
        let check = self.call.functions.ACLCheckKeyPermissions;
        // SAFETY: see `Call`.
        unsafe { check(self.user.as_ptr(), key.text, MAY_READ_AND_WRITE) == OK }
    }

    pub(crate) fn may_publish(&self, channel: &[u8]) -> bool {
        let check = self.call.functions.ACLCheckChannelPermissions;
        let channel = self.call.text(channel);
        // SAFETY: see `Call`.
        unsafe { check(self.user.as_ptr(), channel.text, 0) == OK }
    }
}

impl Drop for CallingUser<'_> {
    fn drop(&mut self) {
        // SAFETY: made by this module, and freed once.
        unsafe { (self.call.functions.FreeModuleUser)(self.user.as_ptr()) };
    }
}

/// An open key. Each change goes to the append-only file and to replicas as a plain command with
/// the same effect. So a server without the module can load the file and follow the changes.
pub(crate) struct OpenKey<'a> {
    key: Handle<'a>,
    name: OwnText<'a>,
    changes: Vec<(c_int, &'static CStr)>,
}

struct Handle<'a> {
    call: &'a Call<'a>,
    key: NonNull<c_void>,
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        // SAFETY: opened by this module, and closed once.
        unsafe { (self.call.functions.CloseKey)(self.key.as_ptr()) };
    }
}

/// The changes of a closed key.
pub(crate) struct Changes<'a> {
    name: OwnText<'a>,
    changes: Vec<(c_int, &'static CStr)>,
}

impl Changes<'_> {
    /// Notifies other modules, and clients that watch the key. A notified module may change any key
    /// at once, so no key of this operation may be open.
    pub(crate) fn tell(&self) {
        let call = self.name.call;
        let name = self.name.text;
        for (class, event) in &self.changes {
            // SAFETY: see `Call`.
            unsafe { (call.functions.NotifyKeyspaceEvent)(call.ctx, *class, event.as_ptr(), name) };
        }
        if !self.changes.is_empty() {
            // SAFETY: see `Call`.
            unsafe { (call.functions.SignalModifiedKey)(call.ctx, name) };
        }
    }
}

impl<'a> OpenKey<'a> {
    fn functions(&self) -> &Functions {
        self.name.call.functions
    }

    fn kind(&self) -> c_int {
        // SAFETY: see `Call`.
        unsafe { (self.functions().KeyType)(self.key.key.as_ptr()) }
    }

    /// The value: `None` for a missing key, `Err` for a key that does not hold a string.
    pub(crate) fn value(&self) -> Result<Option<Bytes>, NoText> {
        let mut length = 0;
        match self.kind() {
            KEY_IS_EMPTY => Ok(None),
            // SAFETY: the bytes are copied before the key is touched again.
            KEY_IS_TEXT => unsafe {
                let bytes = (self.functions().StringDMA)(self.key.key.as_ptr(), &mut length, READ);
                Ok(Some(Bytes::copy_from_slice(std::slice::from_raw_parts(bytes.cast(), length))))
            },
            _ => Err(NoText),
        }
    }

    /// Time to live in milliseconds; `None` without an expiry.
    pub(crate) fn time_to_live(&self) -> Option<u64> {
        // SAFETY: see `Call`.
        u64::try_from(unsafe { (self.functions().GetExpire)(self.key.key.as_ptr()) }).ok()
    }

    /// The time of expiry, in milliseconds since 1970; negative without an expiry.
    pub(crate) fn ends_at(&self) -> c_longlong {
        // SAFETY: see `Call`.
        unsafe { (self.functions().GetAbsExpire)(self.key.key.as_ptr()) }
    }

    /// Sets the value, with an expiry in milliseconds since 1970 or [`NO_EXPIRY`]. `None` keeps the
    /// present expiry; the key must then already hold a string.
    pub(crate) fn set(&mut self, value: &[u8], ends_at: Option<c_longlong>) {
        let call = self.name.call;
        let text = call.text(value);
        // An existing string is overwritten in place. To replace the string instead, Redis would
        // look up its key another ten times.
        if self.kind() == KEY_IS_TEXT {
            self.overwrite(value);
        } else {
            // SAFETY: see `Call`.
            unsafe { (self.functions().StringSet)(self.key.key.as_ptr(), text.text) };
        }
        if let Some(at) = ends_at {
            // SAFETY: see `Call`.
            unsafe { (self.functions().SetAbsExpire)(self.key.key.as_ptr(), at) };
        }
        let ends_at = ends_at.unwrap_or_else(|| self.ends_at());
        let replicate = self.functions().Replicate;
        let command = c"SET".as_ptr();
        // SAFETY: see `Call`. The formats name the arguments behind them: Redis string, C string,
        // number.
        unsafe {
            if ends_at == NO_EXPIRY {
                replicate(call.ctx, command, c"ss".as_ptr(), self.name.text, text.text);
            } else {
                let pxat = c"PXAT".as_ptr();
                replicate(
                    call.ctx,
                    command,
                    c"sscl".as_ptr(),
                    self.name.text,
                    text.text,
                    pxat,
                    ends_at,
                );
            }
        }
        self.changes.push((EVENT_TEXT, c"set"));
    }

    /// Overwrites a string. Its expiry stays.
    fn overwrite(&self, value: &[u8]) {
        let mut length = 0;
        // SAFETY: Redis returns `length` bytes that belong to this key alone until the key is
        // touched again.
        unsafe {
            (self.functions().StringTruncate)(self.key.key.as_ptr(), value.len());
            let stands =
                (self.functions().StringDMA)(self.key.key.as_ptr(), &mut length, READ | WRITE);
            std::ptr::copy_nonoverlapping(
                value.as_ptr(),
                stands.cast_mut().cast(),
                length.min(value.len()),
            );
        }
    }

    /// Sets the time of expiry, in milliseconds since 1970.
    pub(crate) fn expire_at(&mut self, at: c_longlong) {
        // SAFETY: see `Call`.
        unsafe {
            if (self.functions().SetAbsExpire)(self.key.key.as_ptr(), at) != OK {
                return;
            }
            (self.functions().Replicate)(
                self.name.call.ctx,
                c"PEXPIREAT".as_ptr(),
                c"sl".as_ptr(),
                self.name.text,
                at,
            );
        }
        self.changes.push((EVENT_GENERIC, c"expire"));
    }

    pub(crate) fn delete(&mut self) {
        if self.kind() == KEY_IS_EMPTY {
            return;
        }
        // SAFETY: see `Call`.
        unsafe {
            (self.functions().DeleteKey)(self.key.key.as_ptr());
            (self.functions().Replicate)(
                self.name.call.ctx,
                c"DEL".as_ptr(),
                c"s".as_ptr(),
                self.name.text,
            );
        }
        self.changes.push((EVENT_GENERIC, c"del"));
    }

    pub(crate) fn close(self) -> Changes<'a> {
        Changes { name: self.name, changes: self.changes }
    }
}

/// The key holds another type than a string.
pub(crate) struct NoText;
