//! Whether a caller may do what a call asks, by [`api::access`].

use api::access::{DeniedError, Owned, Owners, judge};
use api::{
    fault::{Fault, FaultCode},
    method::Method,
};
use model::image::ImageName;
use model::report::report;
use rpc::server::Caller;

use crate::store::Store;

/// Refuses a call that adds the image `name`.
pub(super) fn expect_may_add<M: Method>(
    store: &Store,
    caller: &Caller,
    name: &ImageName,
) -> Result<(), Fault> {
    let owned = store.directories.now().owned_above(name);
    expect_may::<M>(caller, &format!("image {name}"), &owned)
}

/// Refuses a call that changes or deletes the image `name`.
pub(super) fn expect_may_change<M: Method>(
    store: &Store,
    caller: &Caller,
    name: &ImageName,
) -> Result<(), Fault> {
    // Who has the power may delete an image whose record is damaged too.
    let what = format!("image {name}");
    let mut owned = Vec::new();
    if let Ok(record) = store.images.get(name) {
        let notes = record.image.notes;
        let owners = Owners::new(notes.owner_groups, notes.owner_users);
        owned.push(Owned { what: what.clone(), owners });
    }
    owned.extend(store.directories.now().owned_above(name));
    expect_may::<M>(caller, &what, &owned)
}

pub(super) fn expect_may<M: Method>(
    caller: &Caller,
    about: &str,
    owned: &[Owned],
) -> Result<(), Fault> {
    judge(M::NAME, M::ACCESS, &caller.identity, about, owned).map_err(|error| denied(&error))
}

/// What a caller is told who may not do what they ask.
pub(super) fn denied(error: &DeniedError) -> Fault {
    let text = report(error);
    tracing::debug!("refused: {text}");
    Fault::new(FaultCode::Denied, text)
}

#[cfg(test)]
mod tests;
