//! Registers the methods and the pages of subd.

use std::sync::Arc;

use api::Done;
use api::subd::{
    Cleanup, Commit, Fetch, GetConfiguration, GetDirectories, OfferImage, Poll, Prepare,
    SetConfiguration,
};
use rpc::page_frame::Frame;
use rpc::server::Router;
use rpc::tls::Security;

use crate::blocking;
use crate::interface::operator::{self, refuse_if_paused};
use crate::interface::pages;
use crate::interface::service::Service;

/// The router with all methods and pages of `service`.
pub fn router(service: &Arc<Service>, security: &Security) -> Router<Arc<Service>> {
    let router = Router::new("subd", security).with_state(Arc::clone(service));
    let router = pages::add_pages(router, service, Frame::new("subd", security));
    operator::add_methods(router)
        .method::<Poll, _>(async |service, _, request| Ok(service.poll(request).await))
        .method::<GetDirectories, _>(async |service, _, request| {
            blocking(move || service.directories(&request.digests)).await
        })
        .method::<Fetch, _>(async |service, _, request| {
            service.fetcher.start(request).await.map(|()| Done {})
        })
        .method::<Prepare, _>(async |service, _, request| {
            refuse_if_paused(&service.report_state)?;
            service.updater.prepare(request).await.map(|()| Done {})
        })
        .method::<Commit, _>(async |service, _, request| {
            refuse_if_paused(&service.report_state)?;
            service.updater.permit(request.update_id).await?;
            service.updater.commit(request.update_id).map(|()| Done {})
        })
        .method::<OfferImage, _>(async |service, _, request| {
            let Some(trust) = &service.updater.trust else { return Ok(Done {}) };
            let snapshot = service.report_state.read(|state| state.snapshot.clone());
            let scanned = snapshot.and_then(|snapshot| snapshot.tree.clone());
            trust.offer(request, scanned).await.map(|()| Done {})
        })
        .method::<Cleanup, _>(async |service, _, request| {
            blocking(move || service.cleanup(&request.objects)).await
        })
        .method::<GetConfiguration, _>(async |service, _, ()| {
            Ok(service.report_state.read(|state| state.persisted.configuration.clone()))
        })
        .method::<SetConfiguration, _>(async |service, _, request| {
            blocking(move || service.configure(request)).await
        })
}
