//! The machine that subtool calls, waits for, and compares with an image.

use std::sync::Arc;
use std::time::Duration;

use api::fault::FaultCode;
use api::method::Method;
use api::planning::{PlanJob, PlanKey, Planned};
use api::subd::{
    GetRefusedChanges, Poll, PollReply, PollRequest, PreviewScan, PreviewScanReply,
    PreviewScanRequest, ScanReport, SetConfiguration, SetConfigurationRequest,
};
use model::filter::Patterns;
use model::image::required::RequiredImage;
use model::plan::RefusedChanges;
use model::scope::Scope;
use model::tree::Tree;
use rpc::client::{CallError, Client};
use rpc::trees::{TreeReadError, TreeReader};
use tokio::time::Instant;

use super::error::ToolError;

/// How long the machine may take to accept a call.
const ACCEPT_LIMIT: Duration = Duration::from_secs(120);

/// The length of one poll.
const NEWS_WAIT: Duration = Duration::from_secs(5);

/// How long to wait before an unreachable machine is asked again.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// How often a tree that changes while it is read is read again.
const READS_MAX: usize = 10;

/// A machine.
#[derive(Debug)]
pub struct Machine {
    client: Client,
    reader: Arc<TreeReader>,
    deadline: Instant,
    patience: Duration,
}

/// The differences of a machine from an image.
#[derive(Debug)]
pub struct Comparison {
    /// The report that the plan is based on; it has a scan.
    pub reply: PollReply,
    pub scan: Arc<ScanReport>,
    pub planned: Planned,
}

impl Machine {
    /// Returns the machine behind `client`. All waiting ends after `patience` from now.
    pub fn new(client: Client, reader: Arc<TreeReader>, patience: Duration) -> Self {
        Self { client, reader, deadline: Instant::now() + patience, patience }
    }

    /// Returns its client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Calls a method that is answered at once.
    pub async fn call<M: Method>(&self, request: &M::Request) -> Result<M::Reply, CallError> {
        self.client.call_within::<M>(request, ACCEPT_LIMIT).await
    }

    /// Returns its whole report.
    pub async fn poll(&self) -> Result<PollReply, CallError> {
        self.call::<Poll>(&PollRequest::default()).await
    }

    /// Returns its whole report when it has changed since `reply`, or after `wait`.
    pub async fn news(&self, reply: &PollReply, wait: Duration) -> Result<PollReply, CallError> {
        let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        self.call::<Poll>(&PollRequest { have: Some(reply.version), wait_ms }).await?;
        self.poll().await
    }

    /// Returns the error of waiting too long, with the reason `what`.
    pub fn too_long(&self, what: &str) -> ToolError {
        ToolError::TooLong { seconds: self.patience.as_secs(), what: what.to_owned() }
    }

    /// True if there is no time left.
    pub fn is_late(&self) -> bool {
        Instant::now() >= self.deadline
    }

    /// Waits until `enough` accepts the report. Calls `look` with each report. Waits for an
    /// unreachable machine too: it may be restarting.
    ///
    /// # Errors
    ///
    /// [`ToolError::TooLong`] names `what`; the last error if the machine was not there.
    pub async fn wait_until(
        &self,
        what: &str,
        mut look: impl FnMut(&PollReply),
        enough: impl Fn(&PollReply) -> bool,
    ) -> Result<PollReply, ToolError> {
        let mut last: Option<PollReply> = None;
        loop {
            let asked = match &last {
                None => self.poll().await,
                Some(reply) => self.news(reply, NEWS_WAIT).await,
            };
            match asked {
                Ok(reply) => {
                    look(&reply);
                    if enough(&reply) {
                        return Ok(reply);
                    }
                    last = Some(reply);
                }
                Err(
                    error @ (CallError::Connect { .. }
                    | CallError::Lost { .. }
                    | CallError::TimedOut { .. }),
                ) => {
                    if self.is_late() {
                        return Err(error.into());
                    }
                    last = None;
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
                Err(error) => return Err(error.into()),
            }
            if self.is_late() {
                return Err(self.too_long(what));
            }
        }
    }

    /// Returns the scanned tree, and the report of it.
    pub async fn tree(&self) -> Result<(PollReply, Arc<ScanReport>, Tree), ToolError> {
        let what = "the first scan is not complete";
        for _ in 0..READS_MAX {
            let reply = self.wait_until(what, |_| (), |reply| reply.scan.is_some()).await?;
            let scan = Arc::new(reply.scan.clone().expect("it was waited for"));
            match self.reader.from_sub(&self.client, scan.root, None).await {
                Ok(tree) => return Ok((reply, scan, tree)),
                Err(TreeReadError::Changed) => tokio::time::sleep(NEWS_WAIT).await,
                Err(error) => return Err(error.into()),
            }
        }
        Err(TreeReadError::Changed.into())
    }

    /// True if the machine of `reply` scans with the settings of `image`.
    pub fn scans_for(image: &RequiredImage, reply: &PollReply) -> Result<bool, ToolError> {
        let exclusions = Patterns::new(&reply.exclusions)?;
        Ok(reply.scope == Scope::of(&image.scan, exclusions.lines()))
    }

    /// Has the machine scan with the settings of `image`.
    pub async fn scan_for(&self, image: &RequiredImage) -> Result<(), CallError> {
        let scan = Some(image.scan.clone());
        let request = SetConfigurationRequest { scan, limits: None };
        self.call::<SetConfiguration>(&request).await.map(|_| ())
    }

    /// Returns the changes that the machine refuses; none if its release does not tell.
    async fn refused_changes(&self) -> Result<RefusedChanges, CallError> {
        match self.call::<GetRefusedChanges>(&()).await {
            Ok(reply) => Ok(reply.changes.into_iter().collect()),
            Err(error) => match error.code() {
                Some(FaultCode::NoMethod | FaultCode::Denied) => Ok(RefusedChanges::default()),
                _ => Err(error),
            },
        }
    }

    /// Plans the update to `image`; `None` if the machine does not scan with its settings.
    pub async fn compare(
        &self,
        image: &Arc<RequiredImage>,
    ) -> Result<Option<Comparison>, ToolError> {
        let (reply, scan, tree) = self.tree().await?;
        if !Self::scans_for(image, &reply)? {
            return Ok(None);
        }
        let refused = self.refused_changes().await?;
        self.planned(image, reply, scan, tree, refused).await.map(Some)
    }

    /// As [`Machine::compare`], of a machine that does not scan with the settings of `image`: it
    /// does once for this, and its own settings stay. Calls `look` with what it has hashed.
    pub async fn compare_by_preview(
        &self,
        image: &Arc<RequiredImage>,
        mut look: impl FnMut(u64),
    ) -> Result<Comparison, ToolError> {
        let wait_ms = u32::try_from(NEWS_WAIT.as_millis()).unwrap_or(u32::MAX);
        let request = PreviewScanRequest { scan: image.scan.clone(), wait_ms };
        loop {
            match self.call::<PreviewScan>(&request).await {
                Ok(PreviewScanReply { scan: Some(scan), left_alone, .. }) => {
                    match self.reader.from_sub(&self.client, scan.root, None).await {
                        Ok(tree) => {
                            let reply = self.poll().await?;
                            let refused = self.refused_changes().await?.with(left_alone);
                            return self.planned(image, reply, scan.into(), tree, refused).await;
                        }
                        Err(TreeReadError::Changed) => tokio::time::sleep(NEWS_WAIT).await,
                        Err(error) => return Err(error.into()),
                    }
                }
                Ok(PreviewScanReply { hashed_bytes, .. }) => look(hashed_bytes),
                Err(error) => match error.code() {
                    Some(FaultCode::NoMethod) => {
                        return Err(ToolError::OtherScope { image: image.name().clone() });
                    }
                    Some(FaultCode::Busy) => tokio::time::sleep(NEWS_WAIT).await,
                    _ => return Err(error.into()),
                },
            }
            if self.is_late() {
                return Err(self.too_long("the scan with the settings of the image has not ended"));
            }
        }
    }

    async fn planned(
        &self,
        image: &Arc<RequiredImage>,
        reply: PollReply,
        scan: Arc<ScanReport>,
        tree: Tree,
        refused: RefusedChanges,
    ) -> Result<Comparison, ToolError> {
        let job = PlanJob {
            key: PlanKey { image: image.digest, scan: 0, computed: 0 },
            tree,
            scan: Arc::clone(&scan),
            exclusions: Patterns::new(&reply.exclusions)?,
            image: Arc::clone(image),
            computed: Arc::default(),
            refused: Arc::new(refused),
        };
        let planned = self.reader.compute(move || job.run()).await??;
        Ok(Comparison { reply, scan, planned })
    }
}
