//! Forms of pages that call methods.
//!
//! A browser sends the certificate of its user with whatever any site makes it send. So a form is
//! taken only from a page of this server: the browser must name this server as the origin, and the
//! form must have the token that the page gave to this caller. Links do nothing.
//!
//! A form may have fields that prove who sends it, for people without a certificate.

use std::sync::Arc;

use hyper::header::{self, HeaderMap, HeaderName};
use hyper::{Request, Response, StatusCode, Uri};
use system::random::random_bytes;

use super::caller::Caller;
use super::dispatch::{Service, guarded};
use super::page::{self, Page, Query};
use super::router::{Form, FormCall, Kind};
use crate::body::Body;
use api::access::Identity;
use api::codec::Encoding;
use api::fault::{Fault, FaultCode};

/// The name of the field with the token.
pub const TOKEN_FIELD: &str = "token";

/// The longest form, in bytes.
const FORM_BYTES_MAX: usize = 64 << 10;

/// Makes a token for each caller. They are good until the daemon is restarted.
#[derive(Clone)]
pub(super) struct FormTokens(Arc<[u8; 32]>);

impl FormTokens {
    pub(super) fn new() -> Self {
        Self(Arc::new(random_bytes()))
    }

    /// Returns the token of a caller.
    pub(super) fn of(&self, caller: &Caller) -> String {
        self.hash(caller).to_string()
    }

    fn hash(&self, caller: &Caller) -> blake3::Hash {
        blake3::keyed_hash(&self.0, caller.name().as_bytes())
    }

    /// Returns true if `token` is that of the caller. Takes the same time for all tokens.
    fn is_of(&self, caller: &Caller, token: &str) -> bool {
        blake3::Hash::from_hex(token).is_ok_and(|token| token == self.hash(caller))
    }
}

impl Service {
    /// Carries out a form, and shows the page that follows it.
    pub(super) async fn submit(
        &self,
        caller: Caller,
        form: &Form,
        request: &mut Request<Body>,
    ) -> Response<Body> {
        let Some(entry) = self.routes.methods.get(form.method) else {
            return self.error_page(StatusCode::NOT_FOUND, "There is no such page.");
        };
        let running = self.routes.metrics.started(entry.name);
        let called = async {
            check_origin(request.uri(), request.headers())?;
            if !form.has_proof {
                self.admit(&caller, entry).await?;
            }
            let limit = entry.request_bytes_max.min(FORM_BYTES_MAX);
            let (bytes, _held) = self.read(&caller, entry.name, limit, request.body_mut()).await?;
            let fields = fields(&bytes)?;
            if !self.routes.form_tokens.is_of(&caller, fields.get(TOKEN_FIELD).unwrap_or_default())
            {
                let text = "The form is of another time or of another person: reload the page.";
                return Err(Fault::new(FaultCode::Denied, text));
            }
            let FormCall { request, next, user } = (form.read)(&fields)?;
            let mut caller = caller.clone();
            if user.is_some() {
                caller.identity = Arc::new(Identity { user, ..Identity::default() });
            }
            let Kind::Unary(handler) = &entry.kind else {
                let text = format!("{} takes no form", entry.name);
                return Err(Fault::new(FaultCode::Internal, text));
            };
            handler(caller, Encoding::Json, request.into()).await?;
            Ok(next)
        };
        let result = guarded(entry.name, called).await;
        drop(running);
        match result {
            Ok(next) => Page::Redirect(next).into_response(None),
            Err(fault) => {
                self.routes.metrics.failed(entry.name, fault.code);
                self.fault_page(&fault)
            }
        }
    }
}

/// Fails unless the browser says that a page of this server sends the request.
fn check_origin(uri: &Uri, headers: &HeaderMap) -> Result<(), Fault> {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let host = uri.authority().map(|host| host.as_str()).or_else(|| text(header::HOST));
    let origin = text(header::ORIGIN).and_then(|origin| Some(origin.split_once("://")?.1));
    let is_form = text(header::CONTENT_TYPE) == Some("application/x-www-form-urlencoded");
    if origin.is_none() || origin != host || !is_form || page::is_foreign(headers) {
        let text = "Forms are only taken from pages of this server. Programs call methods instead; \
                    see docs/PROTOCOL.md.";
        return Err(Fault::new(FaultCode::Denied, text));
    }
    Ok(())
}

fn fields(bytes: &[u8]) -> Result<Query, Fault> {
    let text = std::str::from_utf8(bytes)
        .map_err(|_| Fault::new(FaultCode::BadRequest, "The form is not UTF-8."))?;
    Ok(page::parameters(text))
}
