//! Finds the fields of a header block that add an entry to the header table (HPACK, RFC 7541,
//! section 6).
//!
//! The scanner walks over the fields and decodes none. It reads the block in pieces of any length.

/// The limit of the library on a number: bytes after the first.
const LONGEST_NUMBER: u32 = 4;

/// Why the fields cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum FieldError {
    #[error("the client sent a number that is too long")]
    LongNumber,
    #[error(
        "the entries of the header table exceed the limit before the settings are acknowledged"
    )]
    Entry,
    #[error("the client sent a field with an empty name")]
    EmptyName,
}

#[derive(Default)]
pub(super) struct FieldScanner {
    expected: Expected,
}

/// What the next byte is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Expected {
    /// The first byte of a field.
    #[default]
    Field,
    /// A further byte of a number.
    Number { value: u32, bytes: u32, then: Then },
    /// The first byte of the length of a string. `more` strings follow.
    Length { more: u8 },
    /// A byte of a string. `more` strings follow.
    Text { left: u32, more: u8 },
}

/// What follows a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    Field,
    /// The name, if the number is 0, and the value.
    Strings,
    /// A string of this length.
    Text {
        more: u8,
    },
}

impl FieldScanner {
    /// A new block begins.
    pub(super) fn begin(&mut self) {
        self.expected = Expected::Field;
    }

    /// Reads a piece of the block. Calls `add` for each field that adds an entry.
    ///
    /// # Errors
    /// `add` has returned false, a number is too long, or a name is empty.
    pub(super) fn read(
        &mut self,
        mut piece: &[u8],
        mut add: impl FnMut() -> bool,
    ) -> Result<(), FieldError> {
        while let Some((first, rest)) = piece.split_first() {
            if let Expected::Text { left, more } = self.expected {
                let taken = (left as usize).min(piece.len());
                piece = &piece[taken..];
                self.text(left - taken as u32, more);
                continue;
            }
            piece = rest;
            match self.expected {
                Expected::Field => self.field(*first, &mut add)?,
                Expected::Length { more } => self.number(*first, 7, Then::Text { more })?,
                Expected::Number { bytes: LONGEST_NUMBER, .. } => {
                    return Err(FieldError::LongNumber);
                }
                Expected::Number { value, bytes, then } => {
                    let value = value + (u32::from(first & 0x7f) << (7 * bytes));
                    if first & 0x80 == 0 {
                        self.after(value, then)?;
                    } else {
                        self.expected = Expected::Number { value, bytes: bytes + 1, then };
                    }
                }
                Expected::Text { .. } => unreachable!("read above"),
            }
        }
        Ok(())
    }

    fn field(&mut self, first: u8, mut add: impl FnMut() -> bool) -> Result<(), FieldError> {
        match first {
            0x80.. => self.number(first, 7, Then::Field)?,
            0x40.. if add() => self.number(first, 6, Then::Strings)?,
            0x40.. => return Err(FieldError::Entry),
            0x20.. => self.number(first, 5, Then::Field)?,
            _ => self.number(first, 4, Then::Strings)?,
        }
        Ok(())
    }

    /// Reads the first byte of a number with a prefix of `bits` bits (RFC 7541, section 5.1).
    fn number(&mut self, first: u8, bits: u32, then: Then) -> Result<(), FieldError> {
        let most = (1 << bits) - 1;
        let value = u32::from(first) & most;
        if value == most {
            self.expected = Expected::Number { value, bytes: 0, then };
            Ok(())
        } else {
            self.after(value, then)
        }
    }

    fn after(&mut self, number: u32, then: Then) -> Result<(), FieldError> {
        match then {
            Then::Field => self.expected = Expected::Field,
            Then::Strings => self.expected = Expected::Length { more: u8::from(number == 0) },
            // The library might begin again at the value, and find other fields in it than the
            // scanner.
            Then::Text { more: 1 } if number == 0 => return Err(FieldError::EmptyName),
            Then::Text { more } => self.text(number, more),
        }
        Ok(())
    }

    fn text(&mut self, left: u32, more: u8) {
        self.expected = match (left, more) {
            (0, 0) => Expected::Field,
            (0, _) => Expected::Length { more: more - 1 },
            _ => Expected::Text { left, more },
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Encodes a number with a prefix of `bits` bits in the first byte (RFC 7541, section 5.1).
    fn number(first: u8, bits: u32, value: u32) -> Vec<u8> {
        let most = (1 << bits) - 1;
        let Some(mut left) = value.checked_sub(most) else { return vec![first | value as u8] };
        let mut bytes = vec![first | most as u8];
        while left >= 0x80 {
            bytes.push(left as u8 | 0x80);
            left >>= 7;
        }
        bytes.push(left as u8);
        bytes
    }

    fn string(is_huffman: bool, length: u32) -> Vec<u8> {
        let mut bytes = number(u8::from(is_huffman) << 7, 7, length);
        // Text that looks like fields that add entries.
        bytes.resize(bytes.len() + length as usize, 0x40);
        bytes
    }

    /// A field, and whether it adds an entry.
    fn field() -> impl Strategy<Value = (Vec<u8>, bool)> {
        let literal = (0..3usize, 0..200u32, 1..300u32, 0..20_000u32, any::<bool>());
        let literal = literal.prop_map(|(kind, name, length, value, is_huffman)| {
            let (first, bits) = [(0x40, 6), (0x10, 4), (0, 4)][kind];
            let index = if name < 100 { 0 } else { name };
            let mut bytes = number(first, bits, index);
            if index == 0 {
                bytes.extend(string(is_huffman, length));
            }
            bytes.extend(string(is_huffman, value));
            (bytes, kind == 0)
        });
        let indexed = (1..5_000u32).prop_map(|index| (number(0x80, 7, index), false));
        prop_oneof![indexed, literal]
    }

    /// Returns whether a field adds an entry.
    fn read(pieces: &[Vec<u8>], at_once: usize, may_add: bool) -> Result<bool, FieldError> {
        let mut scanner = FieldScanner::default();
        scanner.begin();
        let mut adds = false;
        for piece in pieces.concat().chunks(at_once) {
            scanner.read(piece, || {
                adds = true;
                may_add
            })?;
        }
        Ok(adds)
    }

    proptest! {
        #[test]
        fn a_block_is_refused_exactly_if_a_field_adds_an_entry(
            fields in proptest::collection::vec(field(), 0..20),
            at_once in 1..40usize,
        ) {
            let adds = fields.iter().any(|(_, adds)| *adds);
            let mut pieces: Vec<_> = fields.into_iter().map(|(bytes, _)| bytes).collect();
            pieces.insert(0, number(0x20, 5, 4_096));
            prop_assert_eq!(read(&pieces, at_once, true), Ok(adds));
            let refused = if adds { Err(FieldError::Entry) } else { Ok(false) };
            prop_assert_eq!(read(&pieces, at_once, false), refused);
        }

        #[test]
        fn random_bytes_do_not_panic_the_scanner(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            at_once in 1..40usize,
        ) {
            let _ = read(&[bytes], at_once, true);
        }
    }

    #[test]
    fn a_field_without_a_name_is_refused() {
        for field in [&[0, 0, 0x87, 0x44, 5][..], &[0x40, 0], &[0x10, 0x80], &[0, 0x80]] {
            assert_eq!(read(&[field.to_vec()], 1, true), Err(FieldError::EmptyName), "{field:?}");
        }
        assert_eq!(read(&[vec![0, 1, b'a', 0, 0x0f, 1, 0]], 1, true), Ok(false));
    }

    #[test]
    fn numbers_that_the_library_refuses_are_refused() {
        let longest = [0x0f, 0xff, 0xff, 0xff, 0x7f];
        assert_eq!(read(&[longest.to_vec()], 1, true), Ok(false));
        let longer = [0x0f, 0xff, 0xff, 0xff, 0xff, 0];
        assert_eq!(read(&[longer.to_vec()], 1, true), Err(FieldError::LongNumber));
    }
}
