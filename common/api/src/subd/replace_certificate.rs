//! `Subd.ReplaceCertificate`: brings a machine back that was off past the end of its certificate.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Done;
use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};
use model::escape::ByteText;
use model::object::Algorithm;

/// The certificate of subd itself on machines. Only this one is replaced.
pub const OWN_CERTIFICATE: &str = "/etc/dominator/tls/cert.pem";

/// Gives subd another certificate for the key that it has, after its own has ended. No update can
/// bring it then, because no dominator takes orders to a server whose certificate has ended.
pub enum ReplaceCertificate {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReplaceCertificateRequest {
    /// The content of [`OWN_CERTIFICATE`]: the certificate, and those between it and its authority.
    pub chain: ByteText,
}

impl Method for ReplaceCertificate {
    const NAME: &'static str = "Subd.ReplaceCertificate";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = ReplaceCertificateRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("content", Algorithm::Blake3.digest(&request.chain.0))
    }
}
