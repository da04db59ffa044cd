//! `imagetool sign` and `verify-signatures`: signatures on images.

use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::image_server::notes::{ChangeSignatures, ChangeSignaturesRequest};
use certs::signing_key::{KeyError, SigningKey};
use model::image::{Content, ImageName};
use model::object::ObjectId;
use model::signing::{Policy, Signature, Statement, TrustedKeys, endorse};
use model::time_parse;
use serde::Serialize;
use system::clock::wall;

use super::{Context, VerbResult, get_image, print};
use crate::input_files::read_text_up_to;
use crate::output::failure::{Failure, Outcome};

/// Largest file of a key, a statement or a signature, in bytes.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Signs an image, so that machines which trust the key accept it.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  ssh-keygen -t ed25519 -f release-key                     # once
  imagetool sign web/8 --key release-key
  imagetool sign web/8 --key release-key --digest blake3:5f1e... --expires-in 90d
  imagetool sign web/8 --remove SHA256:Zq3o...

What is signed is the digest that the image server says. Give the one that `imagetool add` has
printed with --digest, or sign with `add --sign`, if you do not trust the server.

With a key in an agent or a token:
  imagetool sign web/8 --print > statement
  ssh-keygen -Y sign -n dominator-image-v1 -f release-key.pub statement
  imagetool sign web/8 --statement statement --signature statement.sig

Each key has one signature on an image: a later one replaces the former. A copy of an image has
another name, and must be signed again.")]
pub struct SignArgs {
    /// The name of the image.
    pub name: ImageName,
    /// The private key: ed25519, as `ssh-keygen` makes it.
    #[arg(long, value_name = "FILE", conflicts_with = "statement")]
    #[arg(required_unless_present_any = ["print", "statement", "remove"])]
    pub key: Option<PathBuf>,
    /// File with the passphrase of the key. Default: asks on the terminal if one is needed.
    #[arg(long, value_name = "FILE", requires = "key")]
    pub passphrase_file: Option<PathBuf>,
    /// The signature expires after this time: no further machine is updated to the image. Machines
    /// that have it are still kept equal to it.
    #[arg(long, value_name = "DURATION", value_parser = time_parse::duration)]
    pub expires_in: Option<Duration>,
    /// Sign only if the image has this digest.
    #[arg(long, value_name = "DIGEST")]
    pub digest: Option<ObjectId>,
    /// Print the statement to sign, and sign nothing.
    #[arg(long, conflicts_with_all = ["key", "statement", "remove"])]
    pub print: bool,
    /// Statement that was signed elsewhere.
    #[arg(long, value_name = "FILE", requires = "signature", conflicts_with = "expires_in")]
    pub statement: Option<PathBuf>,
    /// Signature of the statement by `ssh-keygen -Y sign`.
    #[arg(long, value_name = "FILE", requires = "statement")]
    pub signature: Option<PathBuf>,
    /// Remove the signature by this key; may be repeated.
    #[arg(long, value_name = "FINGERPRINT")]
    pub remove: Vec<String>,
}

/// How a new image is signed.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct SignerArgs {
    /// Sign the image with this private key, so that it never exists without a signature. See
    /// `imagetool sign --help`.
    #[arg(long, value_name = "KEY")]
    pub sign: Option<PathBuf>,
    /// File with the passphrase of the key. Default: asks on the terminal if one is needed.
    #[arg(long, value_name = "FILE", requires = "sign")]
    pub passphrase_file: Option<PathBuf>,
    /// The signature expires after this time: no further machine is updated to the image.
    #[arg(long, value_name = "DURATION", value_parser = time_parse::duration, requires = "sign")]
    pub signature_expires_in: Option<Duration>,
}

impl SignerArgs {
    /// Opens the key, if one is given, before any work is done.
    pub fn signer(&self) -> Result<Option<Signer>, Failure> {
        let Some(path) = &self.sign else { return Ok(None) };
        let key = open_key(path, self.passphrase_file.as_deref())?;
        Ok(Some(Signer { key, expires_in: self.signature_expires_in }))
    }
}

/// An open key, and the lifetime of its signatures.
#[derive(Clone, Debug)]
pub struct Signer {
    key: SigningKey,
    expires_in: Option<Duration>,
}

impl Signer {
    /// Signs an image.
    pub fn sign(&self, content: &Content) -> Result<Signature, Failure> {
        warn_of_computed_files(content);
        let statement = statement_on(content, self.expires_in)?;
        self.key.sign(&statement).map_err(|error| Failure::new(&error))
    }
}

/// Warns about parts of the image that no signature covers.
fn warn_of_computed_files(content: &Content) {
    if let Some(rule) = content.computed.first()
        && content.signers.is_empty()
    {
        eprintln!(
            "warning: computed files are signed without their content, such as {} by {}; \
             --computed-signer names keys that must sign it",
            rule.path, rule.source
        );
    }
}

/// Returns the statement about an image that is signed now.
fn statement_on(content: &Content, expires_in: Option<Duration>) -> Result<Statement, Failure> {
    let now = u64::try_from(wall().seconds)
        .map_err(|_| Failure::from_text("the clock shows a time before 1970: set it first"))?;
    let expires = expires_in.map(|duration| now.saturating_add(duration.as_secs()));
    if expires.is_some_and(|expires| expires <= now) {
        return Err(Failure::from_text("the signature would expire at once").misuse());
    }
    Ok(Statement { image: content.name.clone(), digest: content.digest(), signed: now, expires })
}

/// The JSON output.
#[derive(Debug, Serialize)]
struct SignatureRecord {
    key: Option<String>,
    statement: String,
}

/// Signs an image, or changes its signatures otherwise.
pub async fn sign(context: &Context, args: SignArgs) -> VerbResult {
    let failed = |error| Failure::from_image_call(&error, &args.name);
    let key = args.key.as_deref();
    let key = key.map(|path| open_key(path, args.passphrase_file.as_deref())).transpose()?;
    let content = get_image(&context.client, &args.name).await.map_err(failed)?.content;
    let digest = content.digest();
    if content.name != args.name {
        return Err(Failure::from_text(format!("the server sent {} instead", content.name)));
    }
    if args.digest.is_some_and(|wanted| wanted != digest) {
        let text = format!("the image server says that {} has the digest {digest}", args.name);
        return Err(
            Failure::from_text(text).hint("nothing was signed: find out why the digests differ")
        );
    }
    if args.print {
        warn_of_computed_files(&content);
        print(&statement_on(&content, args.expires_in)?.to_string())?;
        return Ok(Outcome::Done);
    }
    let mut add = Vec::new();
    if let Some(key) = key {
        let signer = Signer { key, expires_in: args.expires_in };
        add.push(signer.sign(&content)?);
    }
    if let (Some(statement), Some(signature)) = (&args.statement, &args.signature) {
        let statement = read_text_up_to(statement, "statement", FILE_BYTES_MAX)?;
        let signature = read_text_up_to(signature, "signature", FILE_BYTES_MAX)?;
        add.push(Signature { statement, signature });
    }
    let mut done = Vec::new();
    for signature in &add {
        let checked = signature.check_for(&args.name, &digest).map_err(|e| Failure::new(&e))?;
        done.push(format!("Signed {} ({digest}) with {}.", args.name, checked.fingerprint()));
    }
    for key in &args.remove {
        done.push(format!("Removed the signature by {key} from {}.", args.name));
    }
    let remove = args.remove.clone();
    let request = ChangeSignaturesRequest { name: args.name.clone(), add, remove };
    let reply = context.client.call::<ChangeSignatures>(&request).await.map_err(failed)?;
    // Reported only after the server has accepted it.
    done.iter().for_each(|line| eprintln!("{line}"));
    let records: Vec<SignatureRecord> = reply.signatures.iter().map(signature_record).collect();
    context.print_if_json(&records)?;
    Ok(Outcome::Done)
}

fn signature_record(signature: &Signature) -> SignatureRecord {
    let key = signature.check().ok().map(|checked| checked.fingerprint());
    SignatureRecord { key, statement: signature.statement.clone() }
}

/// Describes a signature for `show`: key, time and expiry.
pub(super) fn describe(signature: &Signature, content: &Content) -> String {
    match signature.check_for(&content.name, &content.digest()) {
        Err(error) => format!("not valid: {}", model::display::error_chain(&error)),
        Ok(checked) => {
            let at = |seconds: u64| {
                let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
                crate::output::time(model::tree::Time { seconds, nanoseconds: 0 })
            };
            let until = match checked.statement.expires {
                Some(expires) => format!(", expires {}", at(expires)),
                None => String::new(),
            };
            format!("{} {}{until}", checked.fingerprint(), at(checked.statement.signed))
        }
    }
}

/// Reads a key, and asks for its passphrase if one is needed.
fn open_key(path: &Path, passphrase: Option<&Path>) -> Result<SigningKey, Failure> {
    let text = read_text_up_to(path, "key", FILE_BYTES_MAX)?;
    let failed = |error: KeyError| Failure::from_text(format!("{}: {error}", path.display()));
    let given =
        passphrase.map(|path| read_text_up_to(path, "passphrase", FILE_BYTES_MAX)).transpose()?;
    let given = given.as_deref().map(|text| text.trim_end_matches(['\r', '\n']));
    match SigningKey::read(&text, given) {
        Err(KeyError::Encrypted) if io::stdin().is_terminal() => {
            let asked = rpassword::prompt_password(format!("Passphrase of {}: ", path.display()));
            let asked = asked.map_err(|error| {
                Failure::from_text(format!("cannot read a passphrase: {error}"))
            })?;
            SigningKey::read(&text, Some(&asked)).map_err(failed)
        }
        Err(error @ KeyError::Encrypted) => Err(failed(error).hint(
            "give the passphrase with --passphrase-file, or sign with an agent: `imagetool sign \
             --help` shows how",
        )),
        Err(error @ (KeyError::Format { .. } | KeyError::Kind { .. })) => {
            Err(failed(error).hint("`ssh-keygen -t ed25519 -f FILE` makes one"))
        }
        other => other.map_err(failed),
    }
}

/// Checks whether enough trusted keys have signed an image.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool verify-signatures web/8 --trusted-keys /etc/subd/trusted-keys
  imagetool verify-signatures web/8 --trusted-keys keys --signatures-needed 2

The file has a public key on each line, as `ssh-keygen` writes it to a .pub file; `images=\"web/\"`
before it lets the key sign only these. The rules are those of machines, without the image that the
machine had before.

Exit codes: 0 enough keys have signed, 3 too few have, 1 the check failed.")]
pub struct VerifySignaturesArgs {
    /// The name of the image.
    pub name: ImageName,
    /// File of trusted keys.
    #[arg(long, value_name = "FILE")]
    pub trusted_keys: PathBuf,
    /// Number of different keys that must have signed.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub signatures_needed: u32,
}

/// The JSON output.
#[derive(Debug, Serialize)]
struct SignatureReport<'call> {
    name: &'call ImageName,
    enough: bool,
    needed: u32,
    keys: Vec<String>,
    why: Option<String>,
}

pub async fn verify_signatures(context: &Context, args: VerifySignaturesArgs) -> VerbResult {
    let VerifySignaturesArgs { name, trusted_keys, signatures_needed } = args;
    let needed = signatures_needed.max(1);
    let text = read_text_up_to(&trusted_keys, "trusted keys", FILE_BYTES_MAX)?;
    let keys = TrustedKeys::read(&text, needed)
        .map_err(|error| Failure::from_text(format!("{}: {error}", trusted_keys.display())))?;
    let image = context.image(&name).await?;
    let now = u64::try_from(wall().seconds).unwrap_or_default();
    let policy = Policy { keys: &keys, needed, now, passed: 0, even_expired: false };
    let digest = image.content.digest();
    let result = endorse(&name, &digest, &image.notes.signatures, &policy);
    let (keys, why) = match &result {
        Ok(endorsed) => (endorsed.keys.clone(), None),
        Err(why) => (Vec::new(), Some(why.to_string())),
    };
    match &why {
        None => eprintln!("{name} ({digest}) is signed by {}.", keys.join(", ")),
        Some(why) => eprintln!("{why}"),
    }
    let enough = result.is_ok();
    context.print_if_json(&SignatureReport { name: &name, enough, needed, keys, why })?;
    Ok(if enough { Outcome::Done } else { Outcome::Different })
}
