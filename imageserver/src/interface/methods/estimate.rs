//! `ImageServer.EstimateImage`: the space that an image needs alone, and that it shares.

use std::collections::BTreeSet;
use std::sync::Arc;

use api::fault::{Fault, FaultCode};
use api::image_server::collection::{EstimateImageReply, EstimateImageRequest, ObjectTotals};
use model::display::error_chain;
use model::object::ObjectId;
use model::tree::encode::references;

use rpc::server::Caller;

use super::images::get_readable;
use super::{Service, permit};
use crate::core::collection::removal::NeededObjects;
use crate::store::Store;
use crate::store::error::{AdmissionError, WalkError, fault_of_store, joined};
use crate::store::image_trees::{ImageRoots, read_directory, walk};
use crate::store::private_images::Reader;

/// The most attempts when images change meanwhile.
const ATTEMPTS_MAX: u32 = 3;

impl Service {
    pub(super) async fn estimate_image(
        self,
        caller: Caller,
        request: EstimateImageRequest,
    ) -> Result<EstimateImageReply, Fault> {
        let permit = permit(&self.estimates, "estimates")?;
        let (store, stop) = (Arc::clone(&self.store), self.stop.clone());
        let reader = self.reader(&caller);
        let work = move || {
            let _permit = permit;
            estimate(&store, &reader, &request, || stop.is_cancelled())
        };
        joined(self.tasks.spawn_blocking(work).await)?
    }
}

fn estimate(
    store: &Store,
    reader: &Reader,
    request: &EstimateImageRequest,
    stop: impl Fn() -> bool,
) -> Result<EstimateImageReply, Fault> {
    let name = &request.name;
    if let Some((image, _)) = store.images.damaged().into_iter().next() {
        let text = format!("the needs of image {image} are unknown: its record is damaged");
        return Err(Fault::new(FaultCode::Internal, text));
    }
    let stopped = || Fault::new(FaultCode::Unavailable, "the image server stops: ask again");
    let mut attempt = 1;
    loop {
        // An unknown or deleted image gives the same fault as for any other call.
        let record = get_readable(store, reader, name).map_err(|error| fault_of_store(&error))?;
        let (_, mut others) = store.images.roots();
        others.retain(|start| start.image != *name);
        let own = ImageRoots {
            image: name.clone(),
            root: record.image.content.root,
            build_log: record.image.notes.build_log,
        };
        let mut needed = NeededObjects::default();
        let walked = walk(&*store.objects, &mut needed, &others, &stop);
        match walked.and_then(|all| if all { split(store, &needed, &own, &stop) } else { Ok(None) })
        {
            Ok(Some(reply)) => return Ok(reply),
            Ok(None) => return Err(stopped()),
            // An image that was deleted while it was walked may have been collected.
            Err(_) if attempt < ATTEMPTS_MAX => attempt += 1,
            Err(error) => return Err(Fault::new(FaultCode::Internal, error_chain(&error))),
        }
    }
}

/// Splits the objects of `own` into shared and own ones. Returns `None` if `stop` returned true.
fn split(
    store: &Store,
    needed: &NeededObjects,
    own: &ImageRoots,
    stop: impl Fn() -> bool,
) -> Result<Option<EstimateImageReply>, WalkError> {
    let failed = |source| WalkError { image: own.image.clone(), source };
    let mut reply = EstimateImageReply::default();
    let mut seen = BTreeSet::new();
    let mut count = |id: &ObjectId, bytes: u64| {
        let sum: &mut ObjectTotals =
            if needed.contains(id) { &mut reply.shared } else { &mut reply.own };
        sum.count(bytes);
    };
    let mut stack = vec![own.root];
    while let Some(id) = stack.pop() {
        if stop() {
            return Ok(None);
        }
        if !seen.insert(id) {
            continue;
        }
        let encoding = read_directory(&*store.objects, id).map_err(failed)?;
        count(&id, encoding.len() as u64);
        let named = references(id.algorithm(), &encoding)
            .map_err(|source| failed(AdmissionError::NoDirectory { id, source }))?;
        for (file, size_bytes) in named.files {
            if seen.insert(file) {
                count(&file, size_bytes);
            }
        }
        stack.extend(named.directories);
    }
    if let Some(log) = own.build_log.filter(|log| !seen.contains(log)) {
        let size_bytes = store.objects.size_bytes(&log).map_err(|error| failed(error.into()))?;
        count(&log, size_bytes.unwrap_or(0));
    }
    Ok(Some(reply))
}
