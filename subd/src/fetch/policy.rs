//! The decisions of a fetch: whether the objects fit on the file-system, in which requests they are
//! asked for, and whether a source that failed is asked again.
//!
//! Space that an update would free does not count: what it removes is kept until the update is
//! verified, so that it can be undone.
// tidy: core

use std::time::Duration;

use api::subd::{FetchFailure, FetchObject, FreeSpace};
use model::object::ObjectId;

/// The most objects of one request.
const BATCH_OBJECTS_MAX: usize = 2_000;

/// The most bytes of one request. A larger object is requested alone.
const BATCH_BYTES_MAX: u64 = 64 << 20;

/// One request to a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    Batch(Vec<FetchObject>),
    /// The missing end of an object.
    Rest {
        object: FetchObject,
        /// How much of it was received, in bytes.
        from: u64,
    },
}

/// Returns the requests for `objects`: first the missing ends of those with `partial_bytes`, then
/// the others in batches that keep their order.
pub fn requests(objects: &[FetchObject], partial_bytes: impl Fn(&ObjectId) -> u64) -> Vec<Request> {
    let partial_start =
        |object: &FetchObject| Some(partial_bytes(&object.id)).filter(|from| *from > 0);
    let rests = objects.iter().filter_map(|object| {
        partial_start(object).map(|from| Request::Rest { object: *object, from })
    });
    let mut requests: Vec<Request> = rests.collect();
    let mut batch: Vec<FetchObject> = Vec::new();
    let mut bytes = 0_u64;
    for object in objects.iter().filter(|object| partial_start(object).is_none()) {
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

/// The least space of a file on the usual file-systems, in bytes.
const BLOCK_BYTES: u64 = 4_096;

/// The largest reserve for the machine, in bytes. It is a hundredth of the free space otherwise.
const RESERVE_BYTES_MAX: u64 = 64 << 20;

/// The reserve for the machine, in inodes.
const RESERVE_INODES: u64 = 256;

/// Returns the bytes needed to write files of `sizes` bytes and leave a reserve; `None` if they fit
/// into `space`.
pub fn shortage(sizes: impl Iterator<Item = u64>, space: FreeSpace) -> Option<u64> {
    let blocks = |size: u64| size.max(1).div_ceil(BLOCK_BYTES).saturating_mul(BLOCK_BYTES);
    let (mut sum, mut need_inodes) = (0_u64, RESERVE_INODES);
    for size in sizes {
        sum = sum.saturating_add(blocks(size));
        need_inodes += 1;
    }
    let reserve = RESERVE_BYTES_MAX.min(space.free_bytes / 100);
    let need_bytes = sum.saturating_add(reserve);
    (need_bytes > space.free_bytes || need_inodes > space.free_inodes).then_some(need_bytes)
}

/// Checks that files of `sizes` bytes fit into `space` and leave a reserve.
pub fn check_space(sizes: impl Iterator<Item = u64>, space: FreeSpace) -> Result<(), FetchFailure> {
    match shortage(sizes, space) {
        None => Ok(()),
        Some(need_bytes) => {
            Err(FetchFailure::InsufficientSpace { need_bytes, free_bytes: space.free_bytes })
        }
    }
}

/// How often a source is asked again without progress.
const RETRIES_MAX: u32 = 4;

/// The first pause before a source is asked again; each further one is twice as long.
const PAUSE_MIN: Duration = Duration::from_millis(200);

/// The error of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceError {
    /// The parts of an object from several sources do not fit together. The whole object must be
    /// fetched.
    Unfit(String),
    /// It cannot be reached.
    Unreachable(String),
    /// It sent only a part: the connection was lost, or it stopped sending, or it is too busy.
    Cut(String),
    /// It refused, and would refuse again.
    Refused(String),
    /// It sent something that was not requested, or wrong content.
    Lie(String),
    /// An error of this machine, not of the source. The fetch ends.
    Local(FetchFailure),
}

/// What to do after an error of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Ask it again after this pause.
    After(Duration),
    SwitchSource,
}

impl SourceError {
    fn weight(&self) -> u8 {
        match self {
            Self::Unfit(_) => 0,
            Self::Unreachable(_) => 1,
            Self::Cut(_) => 2,
            Self::Refused(_) => 3,
            Self::Lie(_) => 4,
            Self::Local(_) => 5,
        }
    }

    /// Describes it for the complaint.
    pub fn text(&self) -> String {
        match self {
            Self::Unfit(text)
            | Self::Unreachable(text)
            | Self::Cut(text)
            | Self::Refused(text)
            | Self::Lie(text) => text.clone(),
            Self::Local(failure) => failure.to_string(),
        }
    }

    /// Returns the worse of the two; of equals the first.
    pub fn or_worse(self, other: Self) -> Self {
        if other.weight() > self.weight() { other } else { self }
    }
}

/// Counts the failed attempts with a source.
#[derive(Clone, Copy, Debug, Default)]
pub struct RetryCounter {
    failures: u32,
}

impl RetryCounter {
    /// Returns what to do after `error`. `progress` is true if something was received before it,
    /// `others` if there is a source that was not asked yet.
    pub fn after(&mut self, error: &SourceError, progress: bool, others: bool) -> Retry {
        self.failures = if progress { 0 } else { self.failures + 1 };
        match error {
            SourceError::Refused(_) | SourceError::Lie(_) | SourceError::Local(_) => {
                Retry::SwitchSource
            }
            // Another source is tried before waiting for one that is down.
            SourceError::Unreachable(_) if others => Retry::SwitchSource,
            _ if self.failures > RETRIES_MAX => Retry::SwitchSource,
            SourceError::Unfit(_) => Retry::After(Duration::ZERO),
            SourceError::Unreachable(_) | SourceError::Cut(_) => {
                Retry::After(PAUSE_MIN * 2_u32.pow(self.failures.saturating_sub(1)))
            }
        }
    }
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
        let partial_start = |id: &ObjectId| if *id == objects[1].id { 4 } else { 0 };
        let expected = [
            Request::Rest { object: objects[1], from: 4 },
            Request::Batch(vec![objects[0], objects[2]]),
        ];
        assert_eq!(requests(&objects, partial_start), expected);
    }
}

#[cfg(test)]
mod space_tests {
    use super::*;

    #[test]
    fn space_is_counted_in_blocks_with_a_reserve() {
        let space = |free_bytes, free_inodes| FreeSpace { free_bytes, free_inodes };
        let two = || [1, 4_097].into_iter();
        assert_eq!(check_space(two(), space(12_412, 258)), Ok(()));
        let failure = |need_bytes, free_bytes| {
            Err(FetchFailure::InsufficientSpace { need_bytes, free_bytes })
        };
        assert_eq!(check_space(two(), space(12_400, 258)), failure(12_412, 12_400));
        assert_eq!(check_space(two(), space(1_000_000, 257)), failure(22_288, 1_000_000));
        let huge = [u64::MAX, u64::MAX].into_iter();
        assert!(check_space(huge, space(u64::MAX - 1, u64::MAX)).is_err());
    }
}

#[cfg(test)]
mod source_error_tests {
    use super::*;

    #[test]
    fn a_source_is_asked_again_for_a_while_and_as_long_as_something_comes() {
        let text = String::new;
        let again = |ms| Retry::After(Duration::from_millis(ms));
        #[rustfmt::skip]
        let table = [
            (SourceError::Cut(text()),         true,  vec![(false, again(200)), (false, again(400)),
                (true, again(200)), (false, again(200)), (false, again(400)), (false, again(800)),
                (false, again(1_600)), (false, Retry::SwitchSource)]),
            (SourceError::Unreachable(text()), false, vec![(false, again(200)), (false, again(400)),
                (false, again(800)), (false, again(1_600)), (false, Retry::SwitchSource)]),
            (SourceError::Unreachable(text()), true,  vec![(false, Retry::SwitchSource)]),
            (SourceError::Unfit(text()),       true,  vec![(false, again(0)), (true, again(0))]),
            (SourceError::Refused(text()),     false, vec![(true, Retry::SwitchSource)]),
            (SourceError::Lie(text()),         false, vec![(true, Retry::SwitchSource)]),
        ];
        for (error, others, steps) in table {
            let mut retries = RetryCounter::default();
            for (progress, expected) in steps {
                assert_eq!(retries.after(&error, progress, others), expected, "{error:?}");
            }
        }
    }

    #[test]
    fn the_worst_of_several_troubles_counts() {
        let (cut, lie) = (SourceError::Cut("a".to_owned()), SourceError::Lie("b".to_owned()));
        assert_eq!(cut.clone().or_worse(lie.clone()), lie);
        assert_eq!(lie.clone().or_worse(cut.clone()), lie);
        assert_eq!(cut.clone().or_worse(SourceError::Cut("c".to_owned())), cut);
    }
}
