//! Requests, replies, and streams of objects.

use api::codec::{Encoding, decode, encode};
use api::object_stream::ObjectHead;
use api::{dominator, file_generator, image_server, mdb, object_server, subd};
use api::{fault::Fault, method::Method};
use bytes::Bytes;
use model::object::Algorithm;
use rpc::object_reader::ObjectReader;
use rpc::packing::{CHUNK_BYTES_MAX, CHUNK_HEAD_BYTES, ChunkHead, Unpacker};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Decodes values of one type.
type Decode = fn(Encoding, &[u8]);

/// A method with the decoders of its request and its reply.
pub type Decoders = (&'static str, [Decode; 2]);

macro_rules! decoders {
    ($($method:ty),* $(,)?) => {
        &[$((<$method as Method>::NAME, [
            value::<<$method as Method>::Request> as Decode,
            value::<<$method as Method>::Reply> as Decode,
        ])),*]
    };
}

/// All methods that are served. Append new ones: inputs refer to them by index.
pub const METHODS: &[Decoders] = decoders![
    subd::Poll,
    subd::GetDirectories,
    subd::Fetch,
    subd::Prepare,
    subd::Commit,
    subd::Cleanup,
    subd::GetConfiguration,
    subd::SetConfiguration,
    subd::ScanNow,
    subd::Pause,
    subd::Resume,
    subd::GetFiles,
    subd::CheckHealth,
    subd::RetryTriggers,
    image_server::AddImage,
    image_server::GetImage,
    image_server::ListImages,
    image_server::DeleteImage,
    image_server::collection::Collect,
    image_server::collection::EstimateImage,
    image_server::expiry::AcceptClock,
    image_server::expiry::ChangeExpiry,
    image_server::expiry::HoldImages,
    image_server::directories::ChangeOwner,
    image_server::directories::ListDirectories,
    image_server::directories::MakeDirectory,
    image_server::directories::RemoveDirectory,
    image_server::notes::ChangeTags,
    image_server::notes::CopyImage,
    image_server::notes::FindLatestImage,
    image_server::replication::GetImageUpdates,
    image_server::replication::Forward,
    image_server::replication::GetReplication,
    image_server::replication::DropCopy,
    object_server::AddObjects,
    object_server::CheckObjects,
    object_server::GetObjects,
    dominator::ListSubs,
    dominator::ShowSub,
    dominator::GetStatus,
    dominator::DisableUpdates,
    dominator::EnableUpdates,
    dominator::ClearSafetyShutoff,
    dominator::Retry,
    dominator::orders::Trust,
    dominator::orders::AcceptImage,
    dominator::orders::ResumeImage,
    dominator::content::ListContentChanges,
    dominator::content::OrderContentChange,
    dominator::mdb::ShowMdb,
    dominator::mdb::AcceptMdb,
    dominator::events::ListEvents,
    dominator::events::AcceptClock,
    dominator::events::Backup,
    dominator::explain::Explain,
    dominator::orders::PauseUpdates,
    dominator::orders::ResumeUpdates,
    dominator::rollback::RollBack,
    dominator::rollback::EndRollback,
    dominator::rollback::ListLastingOrders,
    dominator::orders::ForceDisruptiveUpdate,
    dominator::orders::GoOn,
    dominator::permits::FenceMachine,
    dominator::permits::ListPermits,
    dominator::departing::ListDeparting,
    dominator::departing::OrderDeparting,
    dominator::orders::FastUpdate,
    dominator::orders::WatchSub,
    dominator::orders::SetDefaultImage,
    dominator::plan::PlanMachine,
    dominator::plan::PlanMachines,
    dominator::plan::CheckMdb,
    dominator::kept_files::CountKeptFiles,
    dominator::resources::GetResources,
    dominator::resources::PlanResources,
    dominator::resources::OrderResource,
    dominator::rollouts::EditEnvironments,
    dominator::rollouts::OrderEnvironment,
    dominator::rollouts::ListEnvironments,
    dominator::rollouts::PlanRollout,
    dominator::rollouts::StartRollout,
    dominator::rollouts::OrderRollout,
    dominator::rollouts::VoteOnStep,
    dominator::rollouts::ListRollouts,
    dominator::settings::SetSubConfiguration,
    dominator::tasks::ListTasks,
    dominator::tasks::GetTask,
    dominator::tasks::OrderTasks,
    dominator::tasks::GetTaskLog,
    dominator::settings::GetSubConfiguration,
    mdb::GetMdb,
    subd::OfferImage,
    subd::OfferContents,
    subd::ForgetIssued,
    subd::GetRefusedChanges,
    subd::GetTasks,
    subd::GetTaskStates,
    subd::OrderTask,
    subd::PermitTask,
    subd::SetNotRestarted,
    subd::GetTaskLog,
    subd::Provision,
    subd::ContinueProvisioning,
    subd::GiveUpProvisioning,
    subd::PlanResources,
    subd::GetResources,
    subd::OrderResource,
    subd::GetFleetResources,
    subd::TellFleetResources,
    subd::HoldMachine,
    subd::TakeOver,
    image_server::notes::ChangeSignatures,
    image_server::replication::directories::GetMadeDirectories,
    image_server::private::ChangeReaders,
    image_server::private::GetPrivateDirectories,
    subd::GetDirectoryBlocks,
    subd::PreviewScan,
    subd::CountOwners,
    subd::GetLimits,
    subd::Hurry,
    dominator::settings::GetSubLimits,
    subd::AddObjects,
    subd::ReplaceCertificate,
    file_generator::Generate,
    file_generator::GetContents,
    file_generator::GetSecrets,
    file_generator::GetGenerators,
    file_generator::OrderRevision,
    file_generator::SignContents,
    file_generator::Load,
    file_generator::RenewCertificates,
];

/// The longest value that is encoded again, in bytes.
const VALUE_BYTES_MAX: usize = 64 << 20;

/// Decodes a request or a reply. The first byte chooses the method, the lowest bit of the second
/// the reply, and the next bit JSON.
pub fn methods(bytes: &[u8]) {
    let [method, form, bytes @ ..] = bytes else { return };
    let (_, [request, reply]) = METHODS[usize::from(*method) % METHODS.len()];
    let encoding = if form & 2 == 0 { Encoding::Bincode } else { Encoding::Json };
    let decode = if form & 1 == 0 { request } else { reply };
    decode(encoding, bytes);
    value::<Fault>(encoding, bytes);
}

/// Checks that a decoded value stays the same when it is encoded and decoded again, in both
/// encodings.
fn value<T: Serialize + DeserializeOwned>(encoding: Encoding, bytes: &[u8]) {
    let Ok(value) = decode::<T>(encoding, "value", bytes, VALUE_BYTES_MAX) else { return };
    let written = |encoding, value: &T| {
        encode(encoding, "value", value).expect("what was decoded has an encoding")
    };
    let binary = written(Encoding::Bincode, &value);
    for encoding in [Encoding::Bincode, Encoding::Json] {
        let text = written(encoding, &value);
        let again: T = decode(encoding, "value", &text, VALUE_BYTES_MAX)
            .unwrap_or_else(|error| panic!("{encoding:?}: {error}"));
        assert_eq!(written(Encoding::Bincode, &again), binary, "{encoding:?}");
    }
}

/// What a reader has read from a stream: the size and the digest of each object.
#[derive(Debug, PartialEq, Eq)]
struct StreamContent {
    heads: Vec<ObjectHead>,
    contents: Vec<(u64, Option<model::object::ObjectId>)>,
    end: Result<(), String>,
}

/// Reads a stream of objects. The first byte chooses the size of its pieces, on which the result
/// must not depend.
pub fn stream(bytes: &[u8]) {
    let Some((first, bytes)) = bytes.split_first() else { return };
    let whole = read(bytes, bytes.len().max(1));
    assert_eq!(read(bytes, usize::from(*first) + 1), whole);
}

fn read(bytes: &[u8], piece: usize) -> StreamContent {
    let pieces: Vec<std::io::Result<Bytes>> =
        bytes.chunks(piece).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
    let mut reader = ObjectReader::of_stream(futures_util::stream::iter(pieces));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let runtime = runtime.expect("the machine has a clock");
    let mut got = StreamContent { heads: Vec::new(), contents: Vec::new(), end: Ok(()) };
    got.end = runtime.block_on(async {
        loop {
            let head = reader.head().await.map_err(|error| model::display::error_chain(&error))?;
            got.heads.push(head);
            match head {
                ObjectHead::End => return Ok(()),
                ObjectHead::Absent(_) => {}
                ObjectHead::Object { size_bytes, .. } => {
                    let mut hasher = model::object::Hasher::new(Algorithm::Blake3);
                    let mut left = size_bytes;
                    got.contents.push((left, None));
                    while let Some(part) =
                        reader.chunk().await.map_err(|error| model::display::error_chain(&error))?
                    {
                        assert!(!part.is_empty() && part.len() as u64 <= left);
                        left -= part.len() as u64;
                        hasher.update(&part);
                    }
                    assert_eq!(left, 0);
                    got.contents.pop();
                    got.contents.push((size_bytes, Some(hasher.finish())));
                }
            }
        }
    });
    got
}

/// Unpacks one chunk of an object.
pub fn chunk(bytes: &[u8]) {
    let Some((head, packed)) = bytes.split_first_chunk::<CHUNK_HEAD_BYTES>() else { return };
    let Ok(head) = ChunkHead::decode(*head, u64::MAX) else { return };
    assert!((1..=CHUNK_BYTES_MAX).contains(&head.content_bytes));
    assert!(head.packed_bytes <= head.content_bytes);
    let mut unpacker = Unpacker::default();
    for _twice in 0..2 {
        if let Ok(content) = unpacker.unpack(head, packed) {
            assert_eq!(content.len(), head.content_bytes);
        }
    }
}
