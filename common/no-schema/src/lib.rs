//! A derive that makes nothing, in place of `schemars::JsonSchema`.
//!
//! Only the tests that make `docs/openapi.json` describe types. With the feature `schema`, which
//! they turn on, `model::JsonSchema` is that of schemars; without it, it is this one, so that no
//! agent is built of schemars.

use proc_macro::TokenStream;

/// Makes nothing of a type, and accepts the attributes of schemars.
#[proc_macro_derive(JsonSchema, attributes(schemars))]
pub fn nothing(_: TokenStream) -> TokenStream {
    TokenStream::new()
}
