//! Batches of objects: the framing of `ObjectServer.AddObjects` and `ObjectServer.GetObjects`.
//!
//! A stream is a sequence of frames and one end mark, so that a truncated stream is noticed. A
//! frame is a head of fixed size, followed by the content if it is an object:
//!
//! | bytes | what |
//! |---|---|
//! | 1 | 1: an object follows; 2: the sender does not have it; 3: the end; 4: as 1, but packed |
//! | 1 | algorithm of the id: 1 BLAKE3, 2 SHA-512; absent at the end |
//! | 32 or 64 | digest; absent at the end |
//! | 8 | length of the content before it is packed, little-endian; only of an object |
//!
//! `rpc::packing` describes how content is packed.

use model::object::{Algorithm, ObjectId};

/// The content type of such a stream.
pub const CONTENT_TYPE: &str = "application/x-dominator-objects";

/// The largest head, in bytes.
pub const HEAD_BYTES_MAX: usize = 74;

/// The head of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectHead {
    /// The content of this object follows.
    Object {
        /// The digest of the content.
        id: ObjectId,
        /// The length of the content.
        size_bytes: u64,
    },
    /// The sender does not have this object.
    Absent(ObjectId),
    /// Nothing follows.
    End,
}

/// Bytes that are not the head of a frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bad object stream: {what} {value} is unknown")]
pub struct HeadError {
    what: &'static str,
    value: u8,
}

/// How the content of an object is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentForm {
    /// Unchanged.
    Plain,
    /// In packed chunks (`rpc::packing`). Only for readers that accept them.
    Packed,
}

impl ObjectHead {
    /// Appends the head to `bytes`, for plain content.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        self.encode_as(ContentForm::Plain, bytes);
    }

    /// Appends the head to `bytes`; `form` is how the content is sent.
    pub fn encode_as(&self, form: ContentForm, bytes: &mut Vec<u8>) {
        let mut id_of = |kind: u8, id: &ObjectId| {
            bytes.push(kind);
            bytes.push(id.algorithm().code());
            bytes.extend_from_slice(id.digest());
        };
        match self {
            Self::Object { id, size_bytes } => {
                id_of(if form == ContentForm::Packed { 4 } else { 1 }, id);
                bytes.extend_from_slice(&size_bytes.to_le_bytes());
            }
            Self::Absent(id) => id_of(2, id),
            Self::End => bytes.push(3),
        }
    }

    /// Reads a head from the start of `bytes`. Returns it with the form of the content and its own
    /// length in bytes, or `None` if more bytes are needed.
    ///
    /// # Errors
    ///
    /// Fails if the kind or the algorithm is unknown.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, ContentForm, usize)>, HeadError> {
        let Some(&kind) = bytes.first() else { return Ok(None) };
        match kind {
            1 | 2 | 4 => {}
            3 => return Ok(Some((Self::End, ContentForm::Plain, 1))),
            value => return Err(HeadError { what: "frame kind", value }),
        }
        let Some(&code) = bytes.get(1) else { return Ok(None) };
        let algorithm = Algorithm::from_code(code)
            .ok_or(HeadError { what: "digest algorithm", value: code })?;
        let end = 2 + algorithm.digest_bytes();
        let Some(id) =
            bytes.get(2..end).and_then(|digest| ObjectId::from_digest(algorithm, digest))
        else {
            return Ok(None);
        };
        if kind == 2 {
            return Ok(Some((Self::Absent(id), ContentForm::Plain, end)));
        }
        let Some(size) = bytes.get(end..end + 8) else { return Ok(None) };
        let size_bytes = u64::from_le_bytes(size.try_into().expect("eight bytes were taken"));
        let form = if kind == 4 { ContentForm::Packed } else { ContentForm::Plain };
        Ok(Some((Self::Object { id, size_bytes }, form, end + 8)))
    }
}
