//! The functions of Redis' module interface that are used here, as `redismodule.h` declares them, and safe hands for them.
//! The only file that may be unsafe.
//!
//! Declared by hand: the interface is a C ABI that Redis has kept since 4.0, these are two dozen of its functions, and a
//! generator of bindings would want libclang wherever the workspace is built.

use std::ffi::{CStr, c_char, c_int, c_longlong, c_void};
use std::ptr::NonNull;

use bytes::Bytes;

pub(crate) const OK: c_int = 0;
pub(crate) const ERR: c_int = 1;
const READ: c_int = 1;
const WRITE: c_int = 2;
const KEY_IS_TEXT: c_int = 1;
const NO_EXPIRY: c_longlong = -1;
const FLAG_OUT_OF_MEMORY: c_int = 1 << 10;
/// Access, update, insert, delete.
const MAY_READ_AND_WRITE: c_int = 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7;
const EVENT_GENERIC: c_int = 1 << 2;
const EVENT_TEXT: c_int = 1 << 3;

/// Of one call of a command; Redis' own.
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
        /// Where they are in this process.
        #[allow(non_snake_case)]
        struct Functions {
            Replicate: unsafe extern "C" fn(Ctx, *const c_char, *const c_char, ...) -> c_int,
            $($name: unsafe extern "C" fn($($argument),*) $(-> $answer)?,)*
        }

        impl Functions {
            /// `None` when the server is older than one of them.
            ///
            /// # Safety
            /// The context is one that the server has given.
            unsafe fn find(ctx: Ctx) -> Option<Self> {
                type Get = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
                // SAFETY: a context begins with the address of this function.
                let get: Get = unsafe { std::mem::transmute((*ctx).get_api) };
                let find = |name: &CStr| {
                    let mut found = std::ptr::null_mut();
                    // SAFETY: it writes an address, or nothing.
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
    GetExpire(Key) -> c_longlong;
    SetExpire(Key, c_longlong) -> c_int;
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
    GetCurrentUserName(Ctx) -> Text;
    GetModuleUserFromUserName(Text) -> User;
    FreeModuleUser(User);
    ACLCheckKeyPermissions(User, Text, c_int) -> c_int;
    ACLCheckChannelPermissions(User, Text, c_int) -> c_int;
    NotifyKeyspaceEvent(Ctx, c_int, *const c_char, Text) -> c_int;
}

/// The server that has loaded the module.
pub(crate) struct Server(Functions);

impl Server {
    /// Registers the module; `None` when the server is too old, or has it already.
    ///
    /// # Safety
    /// The context is that of `RedisModule_OnLoad`.
    pub(crate) unsafe fn join(ctx: Ctx, name: &CStr, version: c_int) -> Option<Self> {
        // SAFETY: as promised.
        unsafe {
            let functions = Functions::find(ctx)?;
            if (functions.IsModuleNameBusy)(name.as_ptr()) != 0 {
                return None;
            }
            (functions.SetModuleAttribs)(ctx, name.as_ptr(), version, 1);
            Some(Self(functions))
        }
    }

    /// A command without keys among its arguments: which it touches stands inside them.
    ///
    /// # Safety
    /// The context is that of `RedisModule_OnLoad`.
    pub(crate) unsafe fn add_command(&self, ctx: Ctx, name: &CStr, run: Command, flags: &CStr) -> bool {
        // SAFETY: as promised; Redis copies both texts.
        unsafe { (self.0.CreateCommand)(ctx, name.as_ptr(), run, flags.as_ptr(), 0, 0, 0) == OK }
    }

    /// What tells this process from every other one of the same master.
    ///
    /// # Safety
    /// The context is one that the server has given.
    pub(crate) unsafe fn run_id(&self, ctx: Ctx) -> Option<Vec<u8>> {
        // SAFETY: as promised; the field belongs to the answer, which lives until it is freed.
        unsafe {
            let info = NonNull::new((self.0.GetServerInfo)(ctx, c"server".as_ptr()))?;
            let field = (self.0.ServerInfoGetFieldC)(info.as_ptr(), c"run_id".as_ptr());
            let run_id = (!field.is_null()).then(|| CStr::from_ptr(field).to_bytes().to_vec());
            (self.0.FreeServerInfo)(ctx, info.as_ptr());
            run_id
        }
    }

    /// One call of a command.
    ///
    /// # Safety
    /// Context and arguments are those that Redis has given this call.
    pub(crate) unsafe fn call(&self, ctx: Ctx, arguments: *mut Text, count: c_int) -> Call<'_> {
        // SAFETY: as promised.
        let arguments = unsafe { std::slice::from_raw_parts(arguments, usize::try_from(count).unwrap_or_default()) };
        Call { functions: &self.0, ctx, arguments }
    }
}

/// One call of a command. Nothing else runs on the server until it returns.
pub(crate) struct Call<'a> {
    functions: &'a Functions,
    ctx: Ctx,
    arguments: &'a [Text],
}

// SAFETY of what follows: the context lives as long as the call. Every text, key and user that is made here is freed by its
// owner's Drop, and what Redis lends of a key is copied before the key is closed.
impl Call<'_> {
    /// An argument; the name of the command is the first.
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
        // SAFETY: Redis copies it.
        unsafe { (self.functions.ReplyWithStringBuffer)(self.ctx, answer.as_ptr().cast(), answer.len()) }
    }

    pub(crate) fn reply_error(&self, error: &CStr) -> c_int {
        // SAFETY: Redis copies it.
        unsafe { (self.functions.ReplyWithError)(self.ctx, error.as_ptr()) }
    }

    pub(crate) fn publish(&self, channel: &[u8], message: &[u8]) {
        let (channel, message) = (self.text(channel), self.text(message));
        // SAFETY: see above.
        unsafe { (self.functions.PublishMessage)(self.ctx, channel.text, message.text) };
    }

    /// Who calls, as far as permissions go; nobody when Redis runs it by itself, which may do all.
    pub(crate) fn user(&self) -> Option<CallingUser<'_>> {
        // SAFETY: see above.
        unsafe {
            let name = NonNull::new((self.functions.GetCurrentUserName)(self.ctx))?;
            let user = (self.functions.GetModuleUserFromUserName)(name.as_ptr());
            (self.functions.FreeString)(self.ctx, name.as_ptr());
            NonNull::new(user).map(|user| CallingUser { call: self, user })
        }
    }

    pub(crate) fn text(&self, bytes: &[u8]) -> OwnText<'_> {
        // SAFETY: Redis copies it.
        let text = unsafe { (self.functions.CreateString)(self.ctx, bytes.as_ptr().cast(), bytes.len()) };
        OwnText { call: self, text }
    }

    /// A key to be read; `None` when there is none.
    pub(crate) fn read<'a>(&'a self, name: &'a OwnText<'a>) -> Option<OpenKey<'a>> {
        self.open(name, READ)
    }

    /// A key to be changed, also one that is not there.
    pub(crate) fn write<'a>(&'a self, name: &'a OwnText<'a>) -> Option<OpenKey<'a>> {
        self.open(name, READ | WRITE)
    }

    fn open<'a>(&'a self, name: &'a OwnText<'a>, mode: c_int) -> Option<OpenKey<'a>> {
        // SAFETY: see above.
        let key = NonNull::new(unsafe { (self.functions.OpenKey)(self.ctx, name.text, mode) })?;
        Some(OpenKey { name, key })
    }
}

/// A text of Redis that is ours.
pub(crate) struct OwnText<'a> {
    call: &'a Call<'a>,
    text: Text,
}

impl Drop for OwnText<'_> {
    fn drop(&mut self) {
        // SAFETY: it was made for this, and what has kept it has counted.
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
        let (check, channel) = (self.call.functions.ACLCheckChannelPermissions, self.call.text(channel));
        // SAFETY: see `Call`.
        unsafe { check(self.user.as_ptr(), channel.text, 0) == OK }
    }
}

impl Drop for CallingUser<'_> {
    fn drop(&mut self) {
        // SAFETY: it was made for this.
        unsafe { (self.call.functions.FreeModuleUser)(self.user.as_ptr()) };
    }
}

/// A key that is open: what is changed goes to the append-only file and to replicas, as the plain command that does the same,
/// so that a server without the module can load and follow it.
pub(crate) struct OpenKey<'a> {
    name: &'a OwnText<'a>,
    key: NonNull<c_void>,
}

impl OpenKey<'_> {
    fn functions(&self) -> &Functions {
        self.name.call.functions
    }

    /// What it holds; `Err` for what is no text, `None` for nothing.
    pub(crate) fn value(&self) -> Result<Option<Bytes>, NoText> {
        let mut length = 0;
        // SAFETY: the bytes are copied before the key is touched again.
        unsafe {
            match (self.functions().KeyType)(self.key.as_ptr()) {
                0 => Ok(None),
                KEY_IS_TEXT => {
                    let bytes = (self.functions().StringDMA)(self.key.as_ptr(), &mut length, READ);
                    Ok(Some(Bytes::copy_from_slice(std::slice::from_raw_parts(bytes.cast(), length))))
                }
                _ => Err(NoText),
            }
        }
    }

    /// In milliseconds; `None` without an expiry.
    pub(crate) fn time_to_live(&self) -> Option<u64> {
        // SAFETY: see `Call`.
        u64::try_from(unsafe { (self.functions().GetExpire)(self.key.as_ptr()) }).ok()
    }

    /// When it ends, in milliseconds since 1970; negative without an expiry.
    pub(crate) fn ends_at(&self) -> c_longlong {
        // SAFETY: see `Call`.
        unsafe { (self.functions().GetAbsExpire)(self.key.as_ptr()) }
    }

    pub(crate) fn set(&self, value: &[u8], ends: Ends) {
        let (functions, ctx, value) = (self.functions(), self.name.call.ctx, self.name.call.text(value));
        // SAFETY: see `Call`. The formats name what follows them: text, C text, number.
        unsafe {
            (functions.StringSet)(self.key.as_ptr(), value.text);
            match ends {
                Ends::In(millis) => (functions.SetExpire)(self.key.as_ptr(), millis),
                Ends::At(at) => (functions.SetAbsExpire)(self.key.as_ptr(), at),
                Ends::Never => OK,
            };
            let ends_at = self.ends_at();
            if ends_at == NO_EXPIRY {
                (functions.Replicate)(ctx, c"SET".as_ptr(), c"ss".as_ptr(), self.name.text, value.text);
            } else {
                let pxat = c"PXAT".as_ptr();
                (functions.Replicate)(
                    ctx,
                    c"SET".as_ptr(),
                    c"sscl".as_ptr(),
                    self.name.text,
                    value.text,
                    pxat,
                    ends_at,
                );
            }
        }
        self.notify(EVENT_TEXT, c"set");
    }

    pub(crate) fn expire_in(&self, millis: c_longlong) {
        // SAFETY: see `Call`.
        unsafe {
            if (self.functions().SetExpire)(self.key.as_ptr(), millis) != OK {
                return;
            }
            let (ctx, ends_at) = (self.name.call.ctx, self.ends_at());
            (self.functions().Replicate)(ctx, c"PEXPIREAT".as_ptr(), c"sl".as_ptr(), self.name.text, ends_at);
        }
        self.notify(EVENT_GENERIC, c"expire");
    }

    pub(crate) fn delete(&self) {
        // SAFETY: see `Call`.
        unsafe {
            if (self.functions().KeyType)(self.key.as_ptr()) == 0 {
                return;
            }
            (self.functions().DeleteKey)(self.key.as_ptr());
            (self.functions().Replicate)(self.name.call.ctx, c"DEL".as_ptr(), c"s".as_ptr(), self.name.text);
        }
        self.notify(EVENT_GENERIC, c"del");
    }

    fn notify(&self, class: c_int, event: &CStr) {
        // SAFETY: see `Call`.
        unsafe {
            (self.functions().NotifyKeyspaceEvent)(self.name.call.ctx, class, event.as_ptr(), self.name.text);
        }
    }
}

impl Drop for OpenKey<'_> {
    fn drop(&mut self) {
        // SAFETY: it was opened for this.
        unsafe { (self.functions().CloseKey)(self.key.as_ptr()) };
    }
}

/// The key holds a list or the like.
pub(crate) struct NoText;

/// When a key that is set ends.
pub(crate) enum Ends {
    In(c_longlong),
    /// In milliseconds since 1970.
    At(c_longlong),
    Never,
}
