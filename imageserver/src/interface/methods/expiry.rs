//! `ImageServer`: expiry times, the clock, and images in use.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use api::Done;
use api::fault::{Fault, FaultCode};
use api::image_server::expiry::{
    AcceptClockReply, ChangeExpiry, ChangeExpiryReply, ChangeExpiryRequest, HOLD_SECONDS_MAX,
    HOLDER_BYTES_MAX, HoldImagesRequest, NAMES_MAX,
};
use model::display::{safe_text, utc};
use model::image::ImageName;
use model::time_parse::later;
use rpc::server::Caller;
use system::clock::wall;

use super::Service;
use crate::core::image_expiry::extend_expiry;
use crate::core::image_holds::refusal;
use crate::store::Store;
use crate::store::error::{StoreError, fault_of_store, joined};

impl Service {
    pub(super) async fn change_expiry(
        self,
        caller: Caller,
        request: ChangeExpiryRequest,
    ) -> Result<ChangeExpiryReply, Fault> {
        let ChangeExpiryRequest { name, expires_in_seconds } = request;
        let wanted =
            expires_in_seconds.map(|seconds| later(wall(), Duration::from_secs(seconds.into())));
        let changed = name.clone();
        let notes = self.change_notes::<ChangeExpiry>(&caller, &name, move |notes| {
            notes.expires_at = extend_expiry(notes.expires_at, wanted)
                .map_err(|source| StoreError::Shorter { name: changed, source })?;
            Ok(())
        });
        let expires_at = notes.await?.expires_at;
        let end = expires_at.map_or_else(|| "never".to_owned(), utc);
        tracing::info!(image = %name, expires_at = end, by = %caller, "changed an expiry");
        Ok(ChangeExpiryReply { expires_at })
    }

    pub(super) async fn accept_clock(self, caller: Caller) -> Result<AcceptClockReply, Fault> {
        let expiry = Arc::clone(&self.expiry);
        let reply = joined(self.tasks.spawn_blocking(move || expiry.accept()).await)?;
        let seconds = reply.jumped_seconds;
        tracing::warn!(by = %caller, jumped_seconds = seconds, "the clock is accepted");
        Ok(reply)
    }

    pub(super) async fn hold_images(
        self,
        caller: Caller,
        request: HoldImagesRequest,
    ) -> Result<Done, Fault> {
        let HoldImagesRequest { holder, names, seconds } = request;
        let bad = |text: String| Err(Fault::new(FaultCode::TooLarge, text));
        if names.len() > NAMES_MAX {
            return bad(format!("{} images are held: at most {NAMES_MAX} can be", names.len()));
        }
        if holder.len() > HOLDER_BYTES_MAX {
            return bad(format!("the name of a holder has at most {HOLDER_BYTES_MAX} bytes"));
        }
        let holder = format!("{} ({})", safe_text(&holder, HOLDER_BYTES_MAX), caller.address.ip());
        let names: BTreeSet<ImageName> = names.into_iter().collect();
        let noted = self.blocking(move |store| {
            Ok(store.holding.note(&holder, names, seconds.min(HOLD_SECONDS_MAX)))
        });
        let refuse = |error: crate::core::image_holds::TooManyError| {
            Err(Fault::new(FaultCode::Unavailable, error.to_string()))
        };
        noted.await?.map_or_else(refuse, |()| Ok(Done {}))
    }
}

/// Refuses to delete an image that is in use.
pub(super) fn expect_unused(store: &Store, name: &ImageName) -> Result<(), Fault> {
    match store.holding.holders(name).map_err(|error| fault_of_store(&error))? {
        holders if holders.is_empty() => Ok(()),
        holders => Err(Fault::new(FaultCode::Held, refusal(name, &holders))),
    }
}
