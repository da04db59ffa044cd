//! `FileGenerator`: the content of computed files, which a filegen-server makes for each machine.
//!
//! The server keeps nothing about machines but the certificates that it made for them: each request
//! brings their records. A caller asks with [`Generate`], reads content that it lacks by digest,
//! and asks again for a file when the record of its machine changes, when the generator of its path
//! gets another version, or when the content is no longer valid. Machines may not call these
//! methods: each could read files of the others.

use core::fmt;

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};
use model::escape::ByteText;
use model::mdb::Machine;
use model::object::{Algorithm, ObjectId};
use model::path::TreePath;
use model::signing::Signature;

/// The largest content of a computed file, in bytes.
pub const CONTENT_BYTES_MAX: usize = 4 << 20;

/// The most machines in one [`GenerateRequest`].
pub const MACHINES_MAX: usize = 1_000;

/// The most files in one [`GenerateRequest`].
pub const FILES_MAX: usize = 50_000;

/// The most digests in one [`GetContentsRequest`].
pub const IDS_MAX: usize = 10_000;

/// After how many bytes of content a reply or a request ends, and the rest travels in the next one.
pub const BATCH_BYTES: usize = 8 << 20;

/// The longest wait of [`GetGenerators`], in milliseconds.
pub const GENERATORS_WAIT_MS_MAX: u32 = 120_000;

/// Makes files for machines. The content is kept for a while, and read with [`GetContents`] or
/// [`GetSecrets`].
pub enum Generate {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GenerateRequest {
    /// At most [`MACHINES_MAX`], with at most [`FILES_MAX`] paths.
    pub machines: Vec<WantedFiles>,
    /// True if the machines are to get the files: their content can be signed for them then. It
    /// counts only if the caller may call [`SignContents`].
    pub is_for_use: bool,
}

/// The files that are wanted for one machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WantedFiles {
    pub machine: Machine,
    /// The algorithm of the digests: that of the machine's image.
    pub algorithm: Algorithm,
    pub paths: Vec<TreePath>,
    /// The public key of the machine, for a certificate whose private key stays there: that of the
    /// certificate that the machine has shown to the caller (SubjectPublicKeyInfo in DER). `None`
    /// if it is not known. It counts only if the caller may call [`GetSecrets`], which gives keys
    /// of machines.
    pub key: Option<ByteText>,
    /// A JSON object: by id, the outputs of the resources of the machine. Empty if it has none.
    pub outputs: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GenerateReply {
    /// For each machine of the request, in its order, what became of its paths, in their order.
    pub machines: Vec<Vec<GeneratedFile>>,
}

/// What became of one path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GeneratedFile {
    Made(GeneratedContent),
    /// Nothing could be made. The text says why, without any secret.
    Failed(String),
}

/// The content of a file, by digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GeneratedContent {
    pub id: ObjectId,
    pub size_bytes: u32,
    /// When it has to be made again, in seconds since 1970; 0 if never.
    #[serde(with = "model::json::LargeNumber")]
    pub valid_until_seconds: u64,
    /// The version of the generator that made it.
    pub generator: ObjectId,
    /// True if the content is read with [`GetSecrets`].
    pub is_secret: bool,
}

impl Method for Generate {
    const NAME: &'static str = "FileGenerator.Generate";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = GenerateRequest;
    type Reply = GenerateReply;
}

/// Returns content that is not secret.
pub enum GetContents {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetContentsRequest {
    /// At most [`IDS_MAX`].
    pub ids: Vec<ObjectId>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetContentsReply {
    /// In the order of the request. The reply ends after [`BATCH_BYTES`]: ask again for the rest.
    pub contents: Vec<ComputedContent>,
    /// Digests whose content the server does not have: call [`Generate`] again.
    pub absent: Vec<ObjectId>,
}

/// The content of a computed file. It may be secret, so that its debug text has only the length.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ComputedContent {
    pub id: ObjectId,
    /// At most [`CONTENT_BYTES_MAX`].
    pub bytes: ByteText,
}

impl fmt::Debug for ComputedContent {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ({} bytes)", self.id, self.bytes.0.len())
    }
}

impl Method for GetContents {
    const NAME: &'static str = "FileGenerator.GetContents";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = GetContentsRequest;
    type Reply = GetContentsReply;
}

/// Returns secret content. Each call is recorded in the audit log.
pub enum GetSecrets {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetSecretsRequest {
    /// At most [`IDS_MAX`].
    pub ids: Vec<ObjectId>,
    /// The host names of the machines that the content is for. Content that was made for none of
    /// them is absent.
    pub hostnames: Vec<String>,
}

impl Method for GetSecrets {
    const NAME: &'static str = "FileGenerator.GetSecrets";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    const REPLY_BYTES_MAX: usize = GetContents::REPLY_BYTES_MAX;
    type Request = GetSecretsRequest;
    type Reply = GetContentsReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("contents", request.ids.len())
            .with_list("machines", &request.hostnames)
    }
}

/// Returns the generators. Answers when their version is not `have`, or after `wait_ms`.
pub enum GetGenerators {}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetGeneratorsRequest {
    /// The version that the caller has.
    pub have: Option<ObjectId>,
    /// How long to wait for another one, in milliseconds: at most [`GENERATORS_WAIT_MS_MAX`].
    pub wait_ms: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetGeneratorsReply {
    /// The version. Equal replies have equal versions, also after a restart.
    pub version: ObjectId,
    /// What there is; `None` if the caller has this version.
    pub generators: Option<Generators>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Generators {
    /// Sorted by path.
    pub generators: Vec<Generator>,
    /// Why the newest configuration or one of its files is not in force; empty if it is.
    pub error: String,
    /// How often certificates were to be made anew, which is part of the versions of their
    /// generators.
    #[serde(with = "model::json::LargeNumber")]
    pub renewals: u64,
    /// A random number that is made when numbers of revisions begin anew.
    #[serde(with = "model::json::LargeNumber")]
    pub numbering: u64,
    /// The number of the content revision in force: all that decides the content of files. Each
    /// other set of versions has a higher number.
    #[serde(with = "model::json::LargeNumber")]
    pub revision: u64,
    /// The last order about each revision that had one, sorted by revision.
    pub orders: Vec<RevisionOrder>,
    /// The public key that signs contents, as OpenSSH writes it; `None` if nothing is signed.
    pub signer: Option<String>,
}

/// Whether machines may get the content of a revision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RevisionOrder {
    #[serde(with = "model::json::LargeNumber")]
    pub revision: u64,
    /// Counts the orders of the server: of two about one revision the higher holds.
    #[serde(with = "model::json::LargeNumber")]
    pub number: u64,
    /// Why no machine may get its content; `None` if it was resumed.
    pub stopped: Option<String>,
}

/// What makes the content of one path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Generator {
    pub path: TreePath,
    /// The kind, as in the configuration: `template`.
    pub kind: String,
    /// Another one means that the same machine may get other content.
    pub version: ObjectId,
    pub is_secret: bool,
    /// The content revision since which it has this version.
    #[serde(with = "model::json::LargeNumber")]
    pub revision: u64,
    /// The ids of the resources of machines whose outputs its content is made of; `*` if that may
    /// be any.
    pub resources: Vec<String>,
}

impl Method for GetGenerators {
    const NAME: &'static str = "FileGenerator.GetGenerators";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = GetGeneratorsRequest;
    type Reply = GetGeneratorsReply;
}

/// Has the certificates that were made for machines made anew, before their time. The generators of
/// certificates get other versions, so that dominators ask for them at once.
pub enum RenewCertificates {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RenewCertificatesRequest {
    /// The host names of the machines; `None` for all.
    pub hostnames: Option<Vec<String>>,
    /// Why, for the audit log.
    pub why: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RenewCertificatesReply {
    /// The machines that had certificates, sorted.
    pub hostnames: Vec<String>,
}

impl Method for RenewCertificates {
    const NAME: &'static str = "FileGenerator.RenewCertificates";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = RenewCertificatesRequest;
    type Reply = RenewCertificatesReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        let details = CallDetails::default().why(&request.why);
        match &request.hostnames {
            None => details.with("machines", "all"),
            Some(hostnames) => details.with_list("machines", hostnames),
        }
    }
}

/// Stops or resumes a content revision for all dominators.
pub enum OrderRevision {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OrderRevisionRequest {
    #[serde(with = "model::json::LargeNumber")]
    pub revision: u64,
    /// Why no machine may get its content; `None` to resume it.
    pub stopped: Option<String>,
    /// Why this is ordered, for the audit log.
    pub why: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OrderRevisionReply {
    /// The number of the order; see [`RevisionOrder::number`].
    #[serde(with = "model::json::LargeNumber")]
    pub number: u64,
}

impl Method for OrderRevision {
    const NAME: &'static str = "FileGenerator.OrderRevision";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = OrderRevisionRequest;
    type Reply = OrderRevisionReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        let order = if request.stopped.is_some() { "stop" } else { "resume" };
        CallDetails::default()
            .with("revision", request.revision)
            .with("order", order)
            .why(&request.why)
    }
}

/// Signs which content files of a machine have, for machines that accept only signed content. Only
/// content is signed that was made for this machine and path, and is among the last few.
pub enum SignContents {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SignContentsRequest {
    /// The host name of the machine.
    pub hostname: String,
    /// At most [`model::signing::signers::SIGNED_FILES_MAX`], each path once.
    pub files: Vec<FileContent>,
}

/// The content of a file, by digest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FileContent {
    pub path: TreePath,
    pub id: ObjectId,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SignContentsReply {
    /// Together they are about all files of the request.
    pub signatures: Vec<Signature>,
}

impl Method for SignContents {
    const NAME: &'static str = "FileGenerator.SignContents";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = SignContentsRequest;
    type Reply = SignContentsReply;
}

/// Takes the configuration and its files as they are now, without waiting until nobody changes them
/// any more.
pub enum Load {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LoadRequest {
    /// Why, for the audit log.
    pub why: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LoadReply {
    /// The content revision in force.
    #[serde(with = "model::json::LargeNumber")]
    pub revision: u64,
    /// Why it is not that of the files; empty if it is.
    pub error: String,
}

impl Method for Load {
    const NAME: &'static str = "FileGenerator.Load";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = LoadRequest;
    type Reply = LoadReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().why(&request.why)
    }
}
