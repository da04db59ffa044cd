//! A small image server in memory, that tests can look into and can make lie.

use rpc::tls::Security;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use api::Done;
use api::fault::{Fault, FaultCode};
use api::image_server::notes::{FindLatestImage, FindLatestImageReply};
use api::image_server::{
    AddImage, AddImageReply, DeleteImage, GetImage, ImageSummary, ListImages, ListImagesReply,
};
use api::object_server::{
    AddObjects, AddObjectsReply, CheckObjects, CheckObjectsReply, GetObjects, GetObjectsRequest,
};
use api::object_stream::ObjectHead;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt as _};
use model::image::{Image, ImageName};
use model::object::ObjectId;
use model::tree::{Time, Totals};
use rpc::server::{ObjectReader, Router, StreamError, head_bytes, object_chunks, serve};
use tokio_util::sync::CancellationToken;

/// What the server keeps.
#[derive(Default)]
pub struct State {
    pub objects: BTreeMap<ObjectId, Bytes>,
    pub images: BTreeMap<ImageName, Image>,
    pub deleted: BTreeSet<ImageName>,
    /// Objects that the server says it does not have.
    pub withheld: BTreeSet<ObjectId>,
    /// Objects that never come.
    pub stalled: BTreeSet<ObjectId>,
    /// How many objects were sent to it.
    pub received: u64,
    /// Uploads that are cut short before one is taken whole.
    pub uploads_to_lose: u32,
}

/// A server that runs until it is dropped.
pub struct Server {
    pub address: SocketAddr,
    state: Arc<Mutex<State>>,
    stop: CancellationToken,
    _runtime: tokio::runtime::Runtime,
}

impl Server {
    pub fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(State::default()));
        let stop = CancellationToken::new();
        runtime.spawn(serve(listener, router(&state), stop.clone()));
        Self { address, state, stop, _runtime: runtime }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn router(state: &Arc<Mutex<State>>) -> Router {
    let with = |state: &Arc<Mutex<State>>| Arc::clone(state);
    let (add, get, list, delete) = (with(state), with(state), with(state), with(state));
    let (check, upload, download) = (with(state), with(state), with(state));
    let latest = with(state);
    Router::new("imageserver", &Security::Insecure)
        .method::<AddImage, _>(move |(), _, request| {
            let image = Image { content: request.content, notes: request.notes };
            let digest = image.content.digest();
            let mut state = add.lock().unwrap();
            let taken = free(&state, &image.content.name);
            if taken.is_ok() {
                state.images.insert(image.content.name.clone(), image);
            }
            async move { taken.map(|()| AddImageReply { digest }) }
        })
        .method::<GetImage, _>(move |(), _, request| {
            let state = get.lock().unwrap();
            let found = state.images.get(&request.name).cloned();
            let code = match free(&state, &request.name) {
                Err(fault) if fault.code == FaultCode::Gone => FaultCode::Gone,
                _ => FaultCode::NotFound,
            };
            async move { found.ok_or_else(|| Fault::new(code, "there is no such image")) }
        })
        .method::<ListImages, _>(move |(), _, request| {
            let state = list.lock().unwrap();
            let mut images = state.images.values().map(summary).collect::<Vec<_>>();
            images.retain(|image| request.after.as_ref().is_none_or(|after| image.name > *after));
            // One at a time, so that pages are tried.
            let more = images.len() > 1;
            images.truncate(1);
            async move { Ok(ListImagesReply { images, more }) }
        })
        .method::<FindLatestImage, _>(move |(), _, request| {
            let state = latest.lock().unwrap();
            let mut names = state.images.keys().rev();
            let beside = |name: &&ImageName| {
                let directory = name.as_str().rsplit_once('/').map(|(directory, _)| directory);
                directory == Some(request.directory.as_str())
            };
            let name = names.find(beside).cloned();
            async move { Ok(FindLatestImageReply { name }) }
        })
        .method::<DeleteImage, _>(move |(), _, request| {
            let mut state = delete.lock().unwrap();
            let found = state.images.remove(&request.name);
            if found.is_some() {
                state.deleted.insert(request.name);
            }
            let missing = || Fault::new(FaultCode::NotFound, "there is no such image");
            async move { found.map(|_| Done {}).ok_or_else(missing) }
        })
        .method::<CheckObjects, _>(move |(), _, request| {
            let state = check.lock().unwrap();
            let missing = request.ids.into_iter().filter(|id| !state.objects.contains_key(id));
            let missing = missing.collect();
            async move { Ok(CheckObjectsReply { missing }) }
        })
        .upload::<AddObjects, _>(move |(), _, reader| receive(with(&upload), reader))
        .download::<GetObjects, _, _>(move |(), _, request| {
            let state = download.lock().unwrap();
            let stalls = request.ids.iter().any(|id| state.stalled.contains(id));
            let chunks = if stalls { Vec::new() } else { send(&state, &request) };
            let rest = if stalls {
                stream::pending().left_stream()
            } else {
                stream::empty().right_stream()
            };
            async move { Ok(stream::iter(chunks).chain(rest)) }
        })
}

fn free(state: &State, name: &ImageName) -> Result<(), Fault> {
    if state.deleted.contains(name) {
        return Err(Fault::new(FaultCode::Gone, "it was deleted"));
    }
    if state.images.contains_key(name) {
        return Err(Fault::new(FaultCode::Exists, "it exists"));
    }
    Ok(())
}

fn summary(image: &Image) -> ImageSummary {
    ImageSummary {
        name: image.content.name.clone(),
        digest: image.content.digest(),
        root: image.content.root,
        totals: Totals {
            entries: 1_234,
            bytes: 5_678_900,
            computed: image.content.computed.len() as u64,
            ..Totals::default()
        },
        filter_lines: image.content.filter.as_ref().map(|filter| filter.lines().len() as u32),
        triggers: image.content.triggers.0.len() as u32,
        created_on: Time { seconds: 1_700_000_000, nanoseconds: 0 },
        expires_at: None,
        tags: image.notes.tags.clone(),
        signatures: 0,
    }
}

async fn receive(
    state: Arc<Mutex<State>>,
    mut reader: ObjectReader,
) -> Result<AddObjectsReply, Fault> {
    let bad = |error: StreamError| Fault::new(FaultCode::BadRequest, error.to_string());
    let mut reply = AddObjectsReply::default();
    loop {
        let ObjectHead::Object { id, size_bytes } = reader.head().await.map_err(bad)? else {
            return Ok(reply);
        };
        let mut content = Vec::new();
        while let Some(chunk) = reader.chunk().await.map_err(bad)? {
            content.extend_from_slice(&chunk);
        }
        if content.len() as u64 != size_bytes || id.algorithm().digest(&content) != id {
            return Err(Fault::new(FaultCode::BadRequest, format!("{id} is corrupt")));
        }
        let mut state = state.lock().unwrap();
        state.received += 1;
        reply.added += 1;
        reply.added_bytes += size_bytes;
        state.objects.insert(id, content.into());
        if state.uploads_to_lose > 0 {
            state.uploads_to_lose -= 1;
            return Err(Fault::new(FaultCode::Unavailable, "going down"));
        }
    }
}

fn send(state: &State, request: &GetObjectsRequest) -> Vec<io::Result<Bytes>> {
    let mut chunks = Vec::new();
    for id in &request.ids {
        match state.objects.get(id).filter(|_| !state.withheld.contains(id)) {
            Some(content) => chunks.extend(object_chunks(*id, content.clone()).map(Ok)),
            None => chunks.push(Ok(head_bytes(&ObjectHead::Absent(*id)))),
        }
    }
    chunks.push(Ok(head_bytes(&ObjectHead::End)));
    chunks
}
