//! Takes another certificate for the key of subd after its own has ended. No update can bring it,
//! because no dominator takes orders to a server whose certificate has ended.

use std::path::Path;
use std::sync::Arc;

use api::fault::{Fault, FaultCode};
use api::subd::{OWN_CERTIFICATE, UpdatePhase};
use model::display::error_chain;
use model::escape::ByteText;
use model::path::TreePath;
use rpc::server::Caller;
use rpc::tls::{CallerProof, ReplacementError, TlsError, read_file};
use system::durable::DurableError;

use super::OwnCertificates;
use super::former_files::put_in_place;
use super::put_back::{FormerFile, Record};
use crate::root::RootError;
use crate::update::Updater;
use crate::update::stage::StageError;

/// The file of the certificate.
const CERTIFICATE: &str = "cert.pem";

/// While the certificate is replaced, no update is staged or carried out.
const NO_UPDATE: u64 = 0;

/// Why the certificate is not replaced.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("the certificate is refused")]
    Certificate(#[from] ReplacementError),
    #[error("cannot read the present certificate")]
    Present(#[source] Box<StageError>),
    #[error("there is no certificate")]
    Absent,
    #[error("former TLS files of subd are being put back")]
    PuttingBack,
    #[error("cannot write the certificate")]
    Write(#[from] RootError),
    #[error("cannot record it")]
    Record(#[from] DurableError),
}

impl Refusal {
    fn code(&self) -> FaultCode {
        match self {
            Self::Certificate(_) => FaultCode::BadRequest,
            Self::Absent => FaultCode::NotFound,
            Self::PuttingBack => FaultCode::Busy,
            Self::Present(_) | Self::Write(_) | Self::Record(_) => FaultCode::Internal,
        }
    }
}

impl Updater {
    /// Puts `chain` in the place of the certificate of subd, which has ended. It is used as soon as
    /// the files are looked at.
    ///
    /// # Errors
    ///
    /// A fault that says why it does not take its place.
    pub async fn replace_certificate(
        self: &Arc<Self>,
        chain: Vec<u8>,
        caller: &Caller,
    ) -> Result<(), Fault> {
        let own = self.own_certificates.as_ref();
        let path = own.and_then(|own| own.directory.join(CERTIFICATE.as_bytes()).ok());
        let path = path.filter(|path| path.as_bytes() == OWN_CERTIFICATE.as_bytes());
        let (Some(path), Some(proof)) = (path, &caller.proof) else {
            let text = format!("the certificate of this subd is not {OWN_CERTIFICATE}");
            return Err(Fault::new(FaultCode::NotFound, text));
        };
        if self.report_state.exclusions().covers(&path) {
            let text = format!("this machine is configured to leave {path} alone");
            return Err(Fault::new(FaultCode::Held, text));
        }
        self.report_state.try_change(|state| {
            if !matches!(state.update, UpdatePhase::Idle | UpdatePhase::Prepared(_)) {
                return Err(Fault::new(FaultCode::Busy, "an update is under way"));
            }
            state.update = UpdatePhase::Preparing(NO_UPDATE);
            Ok(Some(()))
        })?;
        // It does not end with the connection of the caller.
        let (updater, proof, local) = (Arc::clone(self), Arc::clone(proof), caller.local.ip());
        let task = self.tasks.spawn(async move {
            let result = updater.replace(chain, proof, local, path).await;
            updater.report_state.change(|state| state.update = UpdatePhase::Idle);
            result
        });
        task.await.map_err(|error| Fault::new(FaultCode::Internal, error.to_string()))?
    }

    async fn replace(
        self: &Arc<Self>,
        chain: Vec<u8>,
        proof: Arc<CallerProof>,
        local: std::net::IpAddr,
        path: TreePath,
    ) -> Result<(), Fault> {
        let updater = Arc::clone(self);
        let done = crate::blocking(move || {
            updater.discard(None);
            Ok(updater.replace_file(chain, &proof, local))
        });
        let done = done.await?;
        self.report_state.set_cache(|| self.cache.ids());
        match done {
            Ok(()) => tracing::warn!("{path} had ended, and is replaced"),
            Err(refusal) => {
                let text = error_chain(&refusal);
                tracing::warn!("{path} has ended, and is not replaced: {text}");
                return Err(Fault::new(refusal.code(), text));
            }
        }
        if let Ok(snapshot) = self.scanner.scan_touched([path].into()).await {
            self.report_state.take_snapshot(snapshot, self.identity.read(&self.root));
        }
        Ok(())
    }

    /// Blocks.
    fn replace_file(
        &self,
        chain: Vec<u8>,
        proof: &CallerProof,
        local: std::net::IpAddr,
    ) -> Result<(), Refusal> {
        let own = self.own_certificates.as_ref().ok_or(Refusal::Absent)?;
        if own.is_putting_back().is_some() {
            return Err(Refusal::PuttingBack);
        }
        let place = own.security.directory().ok_or(Refusal::Absent)?;
        let present = own.file(&self.root, place, CERTIFICATE);
        let present = present.map_err(|error| Refusal::Present(Box::new(error)))?;
        let next = FormerFile { content: ByteText(chain), ..present.ok_or(Refusal::Absent)? };
        own.check_replacement(&next, proof, local)?;
        let directory = self.root.directory(&own.directory)?;
        put_in_place(&directory, &self.directories, CERTIFICATE.as_bytes(), &next)?;
        directory.sync()?;
        // The caller has reached subd: there is nothing to go back to.
        own.record.modify(|record| *record = Record::default())?;
        Ok(())
    }
}

impl OwnCertificates {
    fn check_replacement(
        &self,
        next: &FormerFile,
        proof: &CallerProof,
        local: std::net::IpAddr,
    ) -> Result<(), ReplacementError> {
        let read = |path: &Path| -> Result<(Vec<u8>, u32), TlsError> {
            match path.file_name().is_some_and(|name| name == CERTIFICATE) {
                true => Ok((next.content.0.clone(), next.mode)),
                false => read_file(path),
            }
        };
        self.security.check_replacement(&read, proof, local).map(drop)
    }
}
