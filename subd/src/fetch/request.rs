//! Divides a fetch into requests: many objects at once, or the rest of one object.
// tidy: core

use api::subd::FetchObject;
use model::object::ObjectId;

/// The most objects that are asked for at once.
const BATCH_OBJECTS_MAX: usize = 2_000;

/// The most that is asked for at once, in bytes; a larger object is asked for alone.
const BATCH_BYTES_MAX: u64 = 64 << 20;

/// One request to a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    Batch(Vec<FetchObject>),
    /// What is missing of an object.
    Rest {
        object: FetchObject,
        /// How much of it has arrived, in bytes.
        from: u64,
    },
}

/// The requests that get `objects`: first what is missing of those of which `partial_bytes` have
/// arrived, then the others in batches that keep their order.
pub fn requests(objects: &[FetchObject], partial_bytes: impl Fn(&ObjectId) -> u64) -> Vec<Request> {
    let begun = |object: &FetchObject| Some(partial_bytes(&object.id)).filter(|from| *from > 0);
    let rests = objects
        .iter()
        .filter_map(|object| begun(object).map(|from| Request::Rest { object: *object, from }));
    let mut requests: Vec<Request> = rests.collect();
    let mut batch: Vec<FetchObject> = Vec::new();
    let mut bytes = 0_u64;
    for object in objects.iter().filter(|object| begun(object).is_none()) {
        let fits = bytes.saturating_add(object.size_bytes) <= BATCH_BYTES_MAX;
        if !batch.is_empty() && (!fits || batch.len() == BATCH_OBJECTS_MAX) {
            requests.push(Request::Batch(std::mem::take(&mut batch)));
            bytes = 0;
        }
        bytes = bytes.saturating_add(object.size_bytes);
        batch.push(*object);
    }
    if !batch.is_empty() {
        requests.push(Request::Batch(batch));
    }
    requests
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;

    fn object(number: u64, size_bytes: u64) -> FetchObject {
        FetchObject { id: Algorithm::Blake3.digest(&number.to_le_bytes()), size_bytes }
    }

    #[test]
    fn batches_are_limited_in_number_and_in_bytes() {
        let lengths = |objects: &[FetchObject]| -> Vec<usize> {
            let length = |request: &Request| match request {
                Request::Batch(objects) => objects.len(),
                Request::Rest { .. } => panic!("{request:?}"),
            };
            requests(objects, |_| 0).iter().map(length).collect()
        };
        assert_eq!(lengths(&[]), [0_usize; 0]);
        let many: Vec<_> = (0..4_001).map(|number| object(number, 1)).collect();
        assert_eq!(lengths(&many), [2_000, 2_000, 1]);
        let mib = 1 << 20;
        let sizes = [40, 20, 10, 100, 64, 0, 1].map(|size| size * mib);
        let large: Vec<_> = (0..).zip(sizes).map(|(number, size)| object(number, size)).collect();
        assert_eq!(lengths(&large), [2, 1, 1, 2, 1]);
    }

    #[test]
    fn what_is_begun_is_asked_for_first_and_from_where_it_ends() {
        let objects = [object(0, 10), object(1, 10), object(2, 10)];
        let begun = |id: &ObjectId| if *id == objects[1].id { 4 } else { 0 };
        let expected = [
            Request::Rest { object: objects[1], from: 4 },
            Request::Batch(vec![objects[0], objects[2]]),
        ];
        assert_eq!(requests(&objects, begun), expected);
    }
}
