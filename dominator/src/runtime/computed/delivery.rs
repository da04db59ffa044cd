//! Gives content to machines, and has it signed for them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use api::fault::FaultCode;
use api::file_generator::{
    BATCH_BYTES, ComputedContent, FileContent, SignContents, SignContentsRequest,
};
use api::subd::{AddObjects, AddObjectsRequest};
use model::display::{error_chain, safe_text};
use model::object::ObjectId;
use model::signing::Signature;
use rpc::client::{CallError, Client};

use super::{AskError, CONTENT_LIMIT, ComputedService, WHY_BYTES_MAX, verify};
use crate::core::sub::ContentsToSign;
use crate::storage::StorageError;

/// How long a server may take to sign the content of a machine.
const SIGN_LIMIT: Duration = Duration::from_secs(10);

/// Why content was not given to a machine.
#[derive(Debug, thiserror::Error)]
pub enum PushError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("the content cannot be read")]
    Store(#[from] StorageError),
    #[error("the content is not stored any more, and is asked for again")]
    Lost,
}

impl ComputedService {
    /// Reads content from the store. Returns what is absent or damaged, if anything is, after it
    /// was removed.
    fn read(
        &self,
        ids: &[ObjectId],
    ) -> Result<Result<Vec<ComputedContent>, Vec<ObjectId>>, StorageError> {
        let mut contents = self.store.contents(ids)?;
        contents.retain(|content| verify(content, &content.id).is_ok());
        let found: BTreeSet<ObjectId> = contents.iter().map(|content| content.id).collect();
        let lost: Vec<ObjectId> = ids.iter().filter(|id| !found.contains(id)).copied().collect();
        if lost.is_empty() {
            return Ok(Ok(contents));
        }
        self.store.remove(&lost)?;
        Ok(Err(lost))
    }

    /// Reads content that a machine is to get. What is lost is asked for again.
    pub(super) async fn contents(
        self: &Arc<Self>,
        ids: Arc<[ObjectId]>,
    ) -> Result<Vec<ComputedContent>, PushError> {
        let lost = match self.on_thread(move |service| service.read(&ids)).await? {
            Ok(contents) => return Ok(contents),
            Err(lost) => lost,
        };
        {
            let mut inner = self.locked();
            inner.table.lost(&lost, self.clock.now());
            inner.servers.values().for_each(|server| server.notify_one());
        }
        self.tell().await;
        Err(PushError::Lost)
    }

    /// Gives content to a machine.
    pub async fn push(
        self: &Arc<Self>,
        client: &Client,
        ids: Arc<[ObjectId]>,
    ) -> Result<(), PushError> {
        let mut contents = self.contents(ids).await?;
        while !contents.is_empty() {
            let mut bytes = 0;
            let fits = |content: &&ComputedContent| {
                bytes += content.bytes.0.len();
                bytes <= BATCH_BYTES
            };
            let count = contents.iter().take_while(fits).count().max(1);
            let rest = contents.split_off(count);
            let request = AddObjectsRequest { contents };
            client.call_within::<AddObjects>(&request, CONTENT_LIMIT).await?;
            contents = rest;
        }
        Ok(())
    }

    /// Has the servers sign what the computed files of a machine will be. Returns the signatures,
    /// and which servers do not sign, and why.
    pub async fn sign(&self, contents: &ContentsToSign) -> (Vec<Signature>, Vec<String>) {
        let mut by_source: BTreeMap<&str, Vec<FileContent>> = BTreeMap::new();
        for (rule, id) in &contents.files {
            let file = FileContent { path: rule.path.clone(), id: *id };
            by_source.entry(&rule.source).or_default().push(file);
        }
        let (mut signatures, mut troubles) = (Vec::new(), Vec::new());
        for (source, files) in by_source {
            match self.sign_at(source, &contents.hostname, files).await {
                Ok(more) => signatures.extend(more),
                Err(error) => {
                    let why = safe_text(&error_chain(&error), WHY_BYTES_MAX);
                    troubles.push(format!("{source}: {why}"));
                }
            }
        }
        (signatures, troubles)
    }

    async fn sign_at(
        &self,
        source: &str,
        hostname: &str,
        files: Vec<FileContent>,
    ) -> Result<Vec<Signature>, AskError> {
        let client = self.client(source)?;
        let request = SignContentsRequest { hostname: hostname.to_owned(), files };
        match client.call_within::<SignContents>(&request, SIGN_LIMIT).await {
            Ok(reply) => Ok(reply.signatures),
            Err(error) => {
                if error.code() == Some(FaultCode::NotFound) {
                    let mut inner = self.locked();
                    inner.table.make_again(hostname, source, self.clock.now());
                    if let Some(server) = inner.servers.get(source) {
                        server.notify_one();
                    }
                }
                Err(error.into())
            }
        }
    }
}
