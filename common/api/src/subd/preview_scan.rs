//! `Subd.PreviewScan`: a scan with other settings, for a plan that is only shown.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ScanReport;
use crate::access::Access;
use crate::method::{Effect, Method};
use model::plan::RefusedChange;
use model::scope::ScanSettings;

/// Scans with these settings beside those in force, which stay: the tree, the generation and the
/// status that polls report do not change. There is one such scan at a time, within the limits of
/// the machine; other settings are answered `busy` while a caller asks for it. It ends if nobody
/// asks for ten minutes. The result is kept for ten minutes, or until [`super::ScanNow`] or an
/// update.
/// [`super::GetDirectories`] and [`super::GetDirectoryBlocks`] return its directories too.
pub enum PreviewScan {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PreviewScanRequest {
    /// How to scan.
    pub scan: ScanSettings,
    /// How long the sub waits for the end of the scan before it answers, as in a poll.
    pub wait_ms: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PreviewScanReply {
    /// What was found; `None` while the scan is under way: ask again.
    pub scan: Option<ScanReport>,
    /// Directories of the scan with too many entries, which a plan leaves alone.
    pub left_alone: Vec<RefusedChange>,
    /// How long ago the scan ended, in seconds.
    pub age_seconds: u32,
    /// How much was hashed since it was asked for.
    #[serde(with = "model::json::LargeNumber")]
    pub hashed_bytes: u64,
}

impl Method for PreviewScan {
    const NAME: &'static str = "Subd.PreviewScan";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = PreviewScanRequest;
    type Reply = PreviewScanReply;
}
