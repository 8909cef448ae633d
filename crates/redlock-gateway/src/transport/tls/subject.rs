//! The subject of a client's certificate, as a text that can be compared with the one in the keys
//! file.

use std::fmt::Write as _;

use x509_cert::Certificate;
use x509_cert::attr::AttributeTypeAndValue;
use x509_cert::der::{Encode, Error, Tag, Tagged};

/// The names of attributes in the text. The list is fixed here, because permissions refer to the
/// text, and no update of a library may change it.
const NAMES: [(&str, &str); 11] = [
    ("2.5.4.3", "CN"),
    ("2.5.4.7", "L"),
    ("2.5.4.8", "ST"),
    ("2.5.4.10", "O"),
    ("2.5.4.11", "OU"),
    ("2.5.4.6", "C"),
    ("2.5.4.9", "STREET"),
    ("0.9.2342.19200300.100.1.25", "DC"),
    ("0.9.2342.19200300.100.1.1", "UID"),
    ("2.5.4.5", "serialNumber"),
    ("1.2.840.113549.1.9.1", "emailAddress"),
];

/// The subject in the notation of RFC 4514, but in the order of the certificate:
/// `C=DE,O=Example,CN=ci` for `openssl req -subj /C=DE/O=Example/CN=ci`.
///
/// An attribute that has no name in [`NAMES`] is written as its number, and its value as `#` and
/// the DER encoding in hexadecimal. A value that is no text is written in the same way, behind the
/// name of its attribute. Attributes of one RDN are joined by `+`. In values a backslash precedes
/// `"`, `+`, `,`, `;`, `<`, `>`, `\`, a `#` in front, and a space at either end. A control
/// character is written as a backslash and two hexadecimal digits.
///
/// `None` when the subject is empty. A certificate may have only alternative names.
pub(super) fn subject(certificate: &Certificate) -> Result<Option<String>, Error> {
    let mut text = String::new();
    for rdn in certificate.tbs_certificate().subject().iter_rdn() {
        for (at, attribute) in rdn.iter().enumerate() {
            match (at, text.is_empty()) {
                (_, true) => {}
                (0, false) => text.push(','),
                (_, false) => text.push('+'),
            }
            add(&mut text, attribute)?;
        }
    }
    Ok(Some(text).filter(|text| !text.is_empty()))
}

fn add(
    text: &mut String,
    AttributeTypeAndValue { oid, value }: &AttributeTypeAndValue,
) -> Result<(), Error> {
    let number = oid.to_string();
    let name = NAMES.iter().find(|(known, _)| *known == number).map(|(_, name)| *name);
    let is_text = matches!(value.tag(), Tag::Utf8String | Tag::PrintableString | Tag::Ia5String);
    match (name, std::str::from_utf8(value.value())) {
        (Some(name), Ok(value)) if is_text => {
            text.push_str(name);
            text.push('=');
            add_escaped(text, value);
        }
        _ => {
            text.push_str(name.unwrap_or(&number));
            text.push_str("=#");
            add_hex(text, &value.to_der()?);
        }
    }
    Ok(())
}

fn add_escaped(text: &mut String, value: &str) {
    let last = value.chars().count().saturating_sub(1);
    for (at, c) in value.chars().enumerate() {
        match c {
            '\0'..='\x1f' | '\x7f' => {
                text.push('\\');
                add_hex(text, &[c as u8]);
                continue;
            }
            '"' | '+' | ',' | ';' | '<' | '>' | '\\' => text.push('\\'),
            '#' if at == 0 => text.push('\\'),
            ' ' if at == 0 || at == last => text.push('\\'),
            _ => {}
        }
        text.push(c);
    }
}

fn add_hex(text: &mut String, bytes: &[u8]) {
    for byte in bytes {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02X}");
    }
}

#[cfg(test)]
mod tests {
    use x509_cert::der::asn1::Any;

    use super::*;

    #[test]
    fn unnamed_attributes_and_no_texts_are_shown_encoded() {
        for (oid, tag, expected) in [
            ("2.5.4.3", Tag::PrintableString, "CN=x"),
            ("2.5.4.12", Tag::Utf8String, "2.5.4.12=#0C0178"),
            ("2.5.4.3", Tag::BmpString, "CN=#1E0178"),
        ] {
            let mut text = String::new();
            let value = Any::new(tag, b"x".as_slice()).unwrap();
            add(&mut text, &AttributeTypeAndValue { oid: oid.parse().unwrap(), value }).unwrap();
            assert_eq!(text, expected);
        }
    }

    #[test]
    fn special_characters_are_escaped() {
        for (value, expected) in [
            ("ci", "ci"),
            ("", ""),
            (" ", r"\ "),
            (" a b ", r"\ a b\ "),
            ("#a#", r"\#a#"),
            ("a=b", "a=b"),
            (r#"a,b+c;d<e>f"g\h"#, r#"a\,b\+c\;d\<e\>f\"g\\h"#),
            ("a\nb\0", r"a\0Ab\00"),
            ("Größe", "Größe"),
        ] {
            let mut text = String::new();
            add_escaped(&mut text, value);
            assert_eq!(text, expected, "{value:?}");
        }
    }
}
