//! The path that forges send webhooks to.

use api::fault::{Fault, FaultCode};
use rpc::server::{Page, PostRequest};

use super::Pages;
use crate::core::webhooks::{Requested, is_signed, requested};

/// The longest body, in bytes.
pub(super) const BYTES_MAX: usize = 1 << 20;

/// Checks a webhook, and has done what it asks for after the answer.
pub(super) fn take(pages: &Pages, request: &PostRequest) -> Result<Page, Fault> {
    let webhooks = &pages.fleet.shared().webhooks;
    let signature = request.header("x-hub-signature-256").unwrap_or_default();
    let known = webhooks.find(&request.below);
    let known = known.filter(|known| is_signed(&known.secret, &request.body, signature));
    let Some(known) = known else {
        let text = "there is no such webhook, or its signature is not that of its secret";
        return Err(Fault::new(FaultCode::Denied, text));
    };
    let event = request.header("x-github-event").unwrap_or_default();
    let requested = requested(&known.webhook, event, &request.body)
        .map_err(|problem| Fault::new(FaultCode::BadRequest, problem))?;
    let change = match requested {
        Requested::Nothing(why) => return Ok(Page::Text(format!("{why}\n"))),
        Requested::Change(change) => change,
    };
    let what = if change.number.is_some() { "planned" } else { "carried out" };
    let text = format!("{} is {what}\n", change.commit);
    match webhooks.add(&known.webhook.name, change) {
        true => Ok(Page::Text(text)),
        false => Err(Fault::new(FaultCode::Unavailable, "too many webhooks wait: send it again")),
    }
}
