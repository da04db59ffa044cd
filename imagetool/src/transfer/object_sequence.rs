//! Fetches objects one after the other, in the order in which they are needed.
//!
//! Only the objects of one request are in flight, so that a slow consumer does not leave further
//! streams unread.

use std::collections::BTreeSet;

use api::object_server::GetObjectsRequest;
use bytes::Bytes;
use model::object::{Hasher, ObjectId};
use rpc::client::{Client, ObjectReader};

use crate::transfer::download::{BATCH_BYTES_MAX, BATCH_OBJECTS_MAX, DownloadError, next_object};

/// TreeObjects, each with its length in bytes, in an order.
pub struct ObjectSequence<'call> {
    client: &'call Client,
    objects: std::vec::IntoIter<(ObjectId, u64)>,
    reader: Option<ObjectReader>,
    /// How many objects of the current batch are still to be read.
    left: usize,
}

/// The content of one object, as it arrives.
pub struct ObjectContent<'sequence> {
    reader: &'sequence mut ObjectReader,
    id: ObjectId,
    hasher: Option<Hasher>,
}

impl<'call> ObjectSequence<'call> {
    /// Starts with the first of `objects`, which may contain duplicates.
    pub fn new(client: &'call Client, objects: Vec<(ObjectId, u64)>) -> Self {
        Self { client, objects: objects.into_iter(), reader: None, left: 0 }
    }

    /// Returns the next object, or `None` after the last. The content of the previous one must have
    /// been read to its end.
    pub async fn next(&mut self) -> Result<Option<ObjectContent<'_>>, DownloadError> {
        if self.left == 0 {
            let ids = batch_of(self.objects.as_slice());
            self.left = ids.len();
            self.reader = match ids.is_empty() {
                true => None,
                false => Some(self.client.get_objects(&GetObjectsRequest { ids }).await?),
            };
        }
        let (Some(reader), Some((id, want))) = (&mut self.reader, self.objects.next()) else {
            return Ok(None);
        };
        self.left -= 1;
        let got = next_object(reader, id).await?;
        if got != want {
            return Err(DownloadError::Size { id, want, got });
        }
        let hasher = Some(Hasher::new(id.algorithm()));
        Ok(Some(ObjectContent { reader, id, hasher }))
    }
}

/// Returns the first of `objects` that one request asks for, without duplicates.
fn batch_of(objects: &[(ObjectId, u64)]) -> Vec<ObjectId> {
    let mut bytes = 0_u64;
    let mut known = BTreeSet::new();
    let fits = |&(id, size_bytes): &(ObjectId, u64)| {
        bytes = bytes.saturating_add(size_bytes);
        let first = known.is_empty();
        known.insert(id) && (first || known.len() <= BATCH_OBJECTS_MAX && bytes <= BATCH_BYTES_MAX)
    };
    objects.iter().copied().take_while(fits).map(|(id, _)| id).collect()
}

impl ObjectContent<'_> {
    /// Returns the next chunk, or `None` at the end, after the digest was verified.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, DownloadError> {
        if let Some(chunk) = self.reader.chunk().await? {
            if let Some(hasher) = &mut self.hasher {
                hasher.update(&chunk);
            }
            return Ok(Some(chunk));
        }
        match self.hasher.take().map(|hasher| hasher.finish()) {
            Some(got) if got != self.id => Err(DownloadError::Digest { want: self.id, got }),
            _ => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;

    #[test]
    fn a_batch_ends_at_its_limits_and_before_what_it_has() {
        let id = |text: &str| Algorithm::Blake3.digest(text.as_bytes());
        let names = ["a", "b", "c", "a", "d"];
        let all = |size: u64| names.map(|name| (id(name), size));
        assert_eq!(batch_of(&all(1)), [id("a"), id("b"), id("c")]);
        assert_eq!(batch_of(&all(BATCH_BYTES_MAX / 2)), [id("a"), id("b")]);
        assert_eq!(batch_of(&all(u64::MAX)), [id("a")]);
        assert_eq!(batch_of(&[]), []);
        let many: Vec<_> = (0..3_000).map(|number| (id(&number.to_string()), 1)).collect();
        assert_eq!(batch_of(&many).len(), BATCH_OBJECTS_MAX);
    }
}
