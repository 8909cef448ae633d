//! The keys file: TOML, one `[[key]]` for each principal. Every error names the key and the allowed
//! values.
//!
//! No error quotes a value, because the value may be a secret in the wrong place.

use std::collections::{HashMap, HashSet};
use std::fs::Metadata;
use std::num::NonZeroU32;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use redlock_core::Ttl;
use serde::Deserialize;
use toml::value::{Datetime, Offset};

use super::key::{Key, Keys, RateLimit, Rule, Verb};
use super::secret::{Hash, is_key_name};
use crate::pattern::Pattern;
use crate::reload::{Content, ReadError, read_one};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    key: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    #[serde(default)]
    hashes: Vec<String>,
    certificate: Option<String>,
    allow: Vec<Allowed>,
    expires: Option<Datetime>,
    max_ttl: Option<String>,
    max_hold: Option<String>,
    rate: Option<u32>,
    burst: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Allowed {
    verbs: Vec<Verb>,
    #[serde(default)]
    names: Vec<String>,
}

/// Why a keys file cannot be used. No text has a part of a secret.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error("{}: it was not read", .0.display())]
    NotRead(PathBuf),
    #[error("{}: {source}", path.display())]
    Unreadable { path: PathBuf, source: ReadError },
    #[error("{}: it is empty; to let nobody in, write a file with only a comment", .0.display())]
    Empty(PathBuf),
    #[error("{}: it is not UTF-8", .0.display())]
    NotUtf8(PathBuf),
    #[error("{}{}{source}", path.display(), source.separator())]
    Text { path: PathBuf, source: KeysTextError },
}

/// The fault in the text of a keys file, and its place.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeysTextError {
    // The parser's own error is no source: it quotes the line, which may have a secret.
    #[error("line {line}: {what}")]
    Syntax { line: usize, what: String },
    #[error("key {0}: the name must be 1 to 64 characters of [A-Za-z0-9_-], and not anonymous")]
    Name(usize),
    #[error("key {name}: {source}")]
    Entry { name: Arc<str>, source: EntryError },
    #[error("key {name}: one of its hashes is there twice; the other is of {other}")]
    HashTwice { name: Arc<str>, other: Arc<str> },
    #[error("key {name}: its certificate is also that of {other}")]
    CertificateTwice { name: Arc<str>, other: Arc<str> },
    #[error("key {0}: the name is there twice; put all of its hashes into one list")]
    NameTwice(Arc<str>),
}

impl KeysTextError {
    /// What stands between the file's name and the place in it.
    fn separator(&self) -> &'static str {
        match self {
            Self::Syntax { .. } => ", ",
            Self::Name(_)
            | Self::Entry { .. }
            | Self::HashTwice { .. }
            | Self::CertificateTwice { .. }
            | Self::NameTwice(_) => ": ",
        }
    }
}

/// The fault in one entry of a keys file, and what is allowed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    #[error("it has neither a hash nor a certificate; `redlock-gateway key new` prints a hash")]
    NoProof,
    #[error(
        "a hash is not \"sha256:\" and 64 hexadecimal digits; `redlock-gateway key new` prints it"
    )]
    Hash,
    #[error("a hash is there twice")]
    HashTwice,
    #[error("a rule allows no verb")]
    NoVerb,
    #[error("a rule has no names; write names = [\"*\"] for all")]
    NoNames,
    #[error("names: number {0} is not a pattern; {allowed}", allowed = Pattern::ALLOWED)]
    Pattern(usize),
    #[error("{0} is not a duration; expected one such as \"30s\" or \"5m\"")]
    Duration(&'static str),
    #[error("max_ttl is not allowed; expected 10ms to 24h in whole milliseconds")]
    MaxTtl,
    #[error("max_hold is not allowed; expected at least 10ms in whole milliseconds")]
    MaxHold,
    #[error("{0}: 0 is not allowed; leave it out for no limit")]
    Zero(&'static str),
    #[error("burst: means nothing without a rate")]
    BurstAlone,
    #[error(
        "expires: {0} is not allowed; expected a date such as 2027-01-31, or 2027-01-31T12:00:00Z"
    )]
    Expires(Datetime),
}

impl Keys {
    /// Reads the keys file at this path.
    ///
    /// # Errors
    /// The fault and its place in the file. Never a part of a secret.
    pub fn read(path: &Path) -> Result<Self, KeysError> {
        Self::of_file(path, &read_one(path))
    }

    /// A warning if others can read or write the file at this path. `None` if its mode cannot be
    /// read.
    pub fn exposure(path: &Path) -> Option<String> {
        // Read permission for the group is no risk to warn of: a service often gets its files
        // through its group.
        let exposed = exposed_mode(&std::fs::metadata(path).ok()?, 0o026)?;
        Some(format!(
            "{}: its mode is {exposed:04o}: users outside its group can read it, or users other than its owner can write it; \
             it decides who may do what here: chmod 640, or 600",
            path.display()
        ))
    }

    /// Parses the content that was read from a file.
    pub(super) fn of_file(path: &Path, content: &Content) -> Result<Self, KeysError> {
        let bytes = content.as_ref().map_err(|error| KeysError::Unreadable {
            path: path.to_owned(),
            source: error.clone(),
        })?;
        // A program may have emptied the file, and may be about to write it. To let nobody in, an
        // operator writes a file that has only a comment.
        if bytes.trim_ascii().is_empty() {
            return Err(KeysError::Empty(path.to_owned()));
        }
        let text = std::str::from_utf8(bytes).map_err(|_| KeysError::NotUtf8(path.to_owned()))?;
        Self::parse(text).map_err(|source| KeysError::Text { path: path.to_owned(), source })
    }

    /// Parses the text of a keys file.
    ///
    /// # Errors
    /// As [`Keys::read`].
    pub fn parse(text: &str) -> Result<Self, KeysTextError> {
        parse(text)
    }
}

/// The file's mode, if it has one of these bits.
pub fn exposed_mode(file: &Metadata, bits: u32) -> Option<u32> {
    let mode = file.permissions().mode() & 0o777;
    (file.is_file() && mode & bits != 0).then_some(mode)
}

fn parse(text: &str) -> Result<Keys, KeysTextError> {
    let file: File = toml::from_str(text).map_err(|error| {
        let line =
            error.span().map_or(0, |span| text[..span.start.min(text.len())].matches('\n').count())
                + 1;
        KeysTextError::Syntax { line, what: without_values(error.message()) }
    })?;
    let mut keys = Keys::default();
    let mut hashes: HashMap<Hash, Arc<str>> = HashMap::new();
    for (index, entry) in file.key.into_iter().enumerate() {
        let number = index + 1;
        if !is_key_name(&entry.name) {
            return Err(KeysTextError::Name(number));
        }
        let name: Arc<str> = entry.name.as_str().into();
        let key = entry.check(name.clone());
        let key =
            Arc::new(key.map_err(|source| KeysTextError::Entry { name: name.clone(), source })?);
        for hash in &key.hashes {
            if let Some(other) = hashes.insert(*hash, name.clone()) {
                return Err(KeysTextError::HashTwice { name, other });
            }
        }
        if let Some(subject) = &key.certificate
            && let Some(other) = keys.by_certificate.insert(subject.clone(), key.clone())
        {
            return Err(KeysTextError::CertificateTwice { name, other: other.name.clone() });
        }
        if keys.by_name.insert(name.clone(), key).is_some() {
            return Err(KeysTextError::NameTwice(name));
        }
    }
    Ok(keys)
}

/// Hides the first value that the parser's message quotes, because it may be a secret. Values that
/// the message quotes later are those that the parser expected.
fn without_values(message: &str) -> String {
    let hide = |text: &str, quote: char| {
        let mut parts = text.splitn(3, quote);
        match (parts.next(), parts.next(), parts.next()) {
            (Some(before), Some(_), Some(after)) => format!("{before}{quote}…{quote}{after}"),
            _ => text.to_owned(),
        }
    };
    let shown = hide(message, '"');
    let is_value = message.starts_with("unknown variant") || message.contains("`rlk.");
    if is_value { hide(&shown, '`') } else { shown }
}

impl Entry {
    fn check(self, name: Arc<str>) -> Result<Key, EntryError> {
        if self.hashes.is_empty() && self.certificate.is_none() {
            return Err(EntryError::NoProof);
        }
        let hash = |text: &String| Hash::parse(text).ok_or(EntryError::Hash);
        let hashes: Vec<_> = self.hashes.iter().map(hash).collect::<Result<_, _>>()?;
        if hashes.iter().collect::<HashSet<_>>().len() < hashes.len() {
            return Err(EntryError::HashTwice);
        }
        let rules = self.allow.into_iter().map(Allowed::check).collect::<Result<_, _>>()?;
        let max_ttl = self.max_ttl.map(|text| duration("max_ttl", &text)).transpose()?;
        let max_ttl = max_ttl
            .map(|time| Ttl::from_duration(time).map_err(|_| EntryError::MaxTtl))
            .transpose()?;
        let max_hold = self.max_hold.map(|text| duration("max_hold", &text)).transpose()?;
        if max_hold.is_some_and(|time| Ttl::from_duration(time.min(Ttl::MAX.duration())).is_err()) {
            return Err(EntryError::MaxHold);
        }
        Ok(Key {
            name,
            hashes,
            certificate: self.certificate.filter(|subject| !subject.is_empty()),
            rules,
            expires: self.expires.map(|date| instant(&date)).transpose()?,
            max_ttl,
            max_hold,
            rate_limit: rate_limit(self.rate, self.burst)?,
            client: Default::default(),
        })
    }
}

impl Allowed {
    fn check(self) -> Result<Rule, EntryError> {
        if self.verbs.is_empty() {
            return Err(EntryError::NoVerb);
        }
        if self.names.is_empty() && self.verbs.iter().any(|verb| verb.is_of_names()) {
            return Err(EntryError::NoNames);
        }
        let pattern = |(index, text): (usize, &String)| {
            Pattern::parse(text).ok_or(EntryError::Pattern(index + 1))
        };
        let names = self.names.iter().enumerate().map(pattern).collect::<Result<_, _>>()?;
        Ok(Rule { verbs: self.verbs, names })
    }
}

fn duration(field: &'static str, text: &str) -> Result<Duration, EntryError> {
    humantime::parse_duration(text).map_err(|_| EntryError::Duration(field))
}

fn rate_limit(rate: Option<u32>, burst: Option<u32>) -> Result<Option<RateLimit>, EntryError> {
    let positive = |field, value| NonZeroU32::new(value).ok_or(EntryError::Zero(field));
    match (rate, burst) {
        (None, None) => Ok(None),
        (None, Some(_)) => Err(EntryError::BurstAlone),
        (Some(rate), burst) => {
            let rate = positive("rate", rate)?;
            Ok(Some(RateLimit::new(
                rate,
                burst.map_or(Ok(rate), |burst| positive("burst", burst))?,
            )))
        }
    }
}

/// The time of a date. A date without a time is its beginning in UTC.
fn instant(date: &Datetime) -> Result<SystemTime, EntryError> {
    let fault = || EntryError::Expires(*date);
    let minutes = match (&date.time, &date.offset) {
        (None, None) | (Some(_), Some(Offset::Z)) => 0,
        (Some(_), Some(Offset::Custom { minutes })) => *minutes,
        (Some(_), None) | (None, Some(_)) => return Err(fault()),
    };
    let day = date.date.ok_or_else(fault)?;
    let time = date.time.map_or("00:00:00".into(), |time| time.to_string());
    let utc = humantime::parse_rfc3339(&format!("{day}T{time}Z")).map_err(|_| fault())?;
    let offset = Duration::from_secs(60 * u64::from(minutes.unsigned_abs()));
    let utc = if minutes < 0 { utc.checked_add(offset) } else { utc.checked_sub(offset) };
    utc.ok_or_else(fault)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HASH: &str = "sha256:2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881";

    #[test]
    fn an_error_names_the_fault_and_what_is_allowed() {
        let key = |rest: &str| format!("[[key]]\nname = 'ci'\nhashes = ['{HASH}']\n{rest}");
        let rule = "allow = [{ verbs = ['acquire'], names = ['*'] }]";
        for (text, expected) in [
            ("[[key]]\nname = 'c i'\nallow = []".to_owned(), ": key 1: the name must be"),
            (
                format!("[[key]]\nname = 'ci'\n{rule}"),
                ": key ci: it has neither a hash nor a certificate",
            ),
            (key(""), ", line 1: missing field `allow`"),
            (key(&format!("{rule}\nexpire = 1")), ", line 5: unknown field `expire`"),
            (
                key("allow = [{ verbs = ['aquire'], names = ['*'] }]"),
                ", line 4: unknown variant `…`, expected one of `acquire`",
            ),
            (
                key("allow = [{ verbs = ['list'] }]"),
                ": key ci: a rule has no names; write names = [\"*\"]",
            ),
            (key("allow = [{ verbs = [], names = ['a'] }]"), ": key ci: a rule allows no verb"),
            (
                key("allow = [{ verbs = ['list'], names = ['a b'] }]"),
                ": key ci: names: number 1 is not a pattern",
            ),
            (key(&format!("{rule}\nmax_ttl = '2 parsecs'")), ": key ci: max_ttl is not a duration"),
            (
                key(&format!("{rule}\nmax_ttl = '1us'")),
                ": key ci: max_ttl is not allowed; expected 10ms",
            ),
            (key(&format!("{rule}\nrate = 0")), ": key ci: rate: 0 is not allowed"),
            (key(&format!("{rule}\nburst = 5")), ": key ci: burst: means nothing without a rate"),
            (
                key(&format!("{rule}\nexpires = 2027-01-01T00:00:00")),
                ": key ci: expires: 2027-01-01T00:00:00 is not",
            ),
            (
                key(&format!("{rule}\nexpires = 12:00:00")),
                ": key ci: expires: 12:00:00 is not allowed",
            ),
            (key(rule) + "\n" + &key(rule), ": key ci: one of its hashes is there twice"),
            (
                key(rule) + "\n" + &key(rule).replace("2d71", "2d72"),
                ": key ci: the name is there twice",
            ),
        ] {
            let error = parse(&text)
                .err()
                .map_or_else(String::new, |error| format!("{}{error}", error.separator()));
            assert!(error.starts_with(expected), "{error}\nfor\n{text}");
        }
        assert!(parse(&key(rule)).is_ok() && parse("").is_ok_and(|keys| keys.is_empty()));
    }

    #[test]
    fn a_key_pasted_in_the_place_of_its_hash_is_not_quoted() {
        let secret = "rlk.ci.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
        for text in [
            format!("[[key]]\nname = 'ci'\nhashes = ['{secret}']\nallow = []"),
            format!("[[key]]\nname = 'ci'\nhashes = '{secret}'\nallow = []"),
            format!("[[key]]\nname = '{secret}'\nhashes = []\nallow = []"),
            format!("[[key]]\nname = 'ci'\nhashes = [{secret}]\nallow = []"),
            format!("[[key]]\nname = 'ci'\nrate = '{secret}'\nallow = []"),
            format!("[[key]]\nname = 'ci'\n'{secret}' = 1\nallow = []"),
            format!("[[key]]\nname = 'ci'\nhashes = ['{HASH}']\nmax_ttl = '{secret}'\nallow = []"),
            format!("[[key]]\nname = 'ci'\nhashes = ['{HASH}']\nmax_hold = '{secret}'\nallow = []"),
            format!("[[key]]\nname = 'ci'\nhashes = ['{HASH}']\nexpires = '{secret}'\nallow = []"),
            format!(
                "[[key]]\nname = 'ci'\nhashes = ['{HASH}']\nallow = [{{ verbs = ['{secret}'], names = ['a'] }}]"
            ),
            format!(
                "[[key]]\nname = 'ci'\nhashes = ['{HASH}']\nallow = [{{ verbs = ['list'], names = ['{secret}='] }}]"
            ),
        ] {
            let error = parse(&text).err().expect("it is wrong").to_string();
            assert!(!error.contains("AAAA"), "{error}");
        }
    }

    proptest! {
        /// Almost a keys file, with one strange line.
        #[test]
        fn no_text_panics_and_no_error_quotes_a_secret(strange in "\\PC{0,40}", at in 0..7usize, cut in 0..300usize) {
            let secret = "rlk.ci.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
            let mut lines = [
                "[[key]]".to_owned(),
                "name = 'ci'".into(),
                format!("hashes = ['{HASH}', '{secret}']"),
                "allow = [{ verbs = ['acquire'], names = ['*'] }]".into(),
                "expires = 2027-01-01".into(),
                "max_ttl = '5s'".into(),
                "rate = 5".into(),
            ];
            lines[at] = strange;
            let text = lines.join("\n");
            let cut = (0..=cut.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or_default();
            for text in [&text, &text[..cut]] {
                let error = parse(text).err().map_or_else(String::new, |error| error.to_string());
                prop_assert!(!error.contains("AAAA"), "{}", error);
            }
        }
    }

    #[test]
    fn dates_are_read_with_their_offset() {
        let at = |text: &str| {
            let date: Datetime = text.parse().unwrap();
            instant(&date).map(|time| humantime::format_rfc3339(time).to_string())
        };
        assert_eq!(at("2027-01-31").as_deref(), Ok("2027-01-31T00:00:00Z"));
        assert_eq!(at("2027-01-31T12:00:00Z").as_deref(), Ok("2027-01-31T12:00:00Z"));
        assert_eq!(at("2027-01-31T12:00:00+02:00").as_deref(), Ok("2027-01-31T10:00:00Z"));
        assert_eq!(at("2027-01-31T23:30:00-01:00").as_deref(), Ok("2027-02-01T00:30:00Z"));
    }
}
