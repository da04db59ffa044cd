//! `imagetool sign` and `verify-signatures`: signatures on images.

use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::image_server::signatures::{ChangeSignatures, ChangeSignaturesRequest};
use certs::signing_key::{KeyError, SigningKey};
use model::image::{Content, ImageName};
use model::object::ObjectId;
use model::signing::{Policy, Signature, Statement, TrustedKeys, endorse};
use model::when::written;
use serde::Serialize;
use tool::Format;

use super::{Context, VerbResult, get_image, print, print_json};
use crate::input_files::read_text_up_to;
use crate::output::failure::{Failure, Outcome};

/// The largest file of a key, a statement or a signature, in bytes.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Signs an image, so that machines which trust the key take it.
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

Each key has one signature on an image: a later one takes the place of the former. A copy of an
image has another name, and must be signed again.")]
pub struct SignArgs {
    /// The name of the image.
    pub name: ImageName,
    /// The private key: ed25519, as `ssh-keygen` makes it.
    #[arg(long, value_name = "FILE", conflicts_with = "statement")]
    #[arg(required_unless_present_any = ["print", "statement", "remove"])]
    pub key: Option<PathBuf>,
    /// A file with the passphrase of the key. Without it you are asked, if one is needed.
    #[arg(long, value_name = "FILE", requires = "key")]
    pub passphrase_file: Option<PathBuf>,
    /// That long from now the signature moves no more machines to the image. Those that have it
    /// are still kept equal to it.
    #[arg(long, value_name = "DURATION", value_parser = written::duration)]
    pub expires_in: Option<Duration>,
    /// Sign only if the image has this digest.
    #[arg(long, value_name = "DIGEST")]
    pub digest: Option<ObjectId>,
    /// Print the statement that is to be signed, and sign nothing.
    #[arg(long, conflicts_with_all = ["key", "statement", "remove"])]
    pub print: bool,
    /// A statement that was signed elsewhere.
    #[arg(long, value_name = "FILE", requires = "signature", conflicts_with = "expires_in")]
    pub statement: Option<PathBuf>,
    /// The signature that `ssh-keygen -Y sign` has made of it.
    #[arg(long, value_name = "FILE", requires = "statement")]
    pub signature: Option<PathBuf>,
    /// Take away the signature by this key; may be given several times.
    #[arg(long, value_name = "FINGERPRINT")]
    pub remove: Vec<String>,
}

/// How a new image is signed.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct SignerArgs {
    /// Sign the image with this private key, so that it is never there without a signature. See
    /// `imagetool sign --help`.
    #[arg(long, value_name = "KEY")]
    pub sign: Option<PathBuf>,
    /// A file with the passphrase of the key. Without it you are asked, if one is needed.
    #[arg(long, value_name = "FILE", requires = "sign")]
    pub passphrase_file: Option<PathBuf>,
    /// That long from now the signature moves no more machines to the image.
    #[arg(long, value_name = "DURATION", value_parser = written::duration, requires = "sign")]
    pub signature_expires_in: Option<Duration>,
}

impl SignerArgs {
    /// Opens the key, if one is given: before any work is done.
    pub fn signer(&self) -> Result<Option<Signer>, Failure> {
        let Some(path) = &self.sign else { return Ok(None) };
        let key = open_key(path, self.passphrase_file.as_deref())?;
        Ok(Some(Signer { key, expires_in: self.signature_expires_in }))
    }
}

/// A key that is ready, and for how long it signs.
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

/// Says what of the image no signature can cover.
fn warn_of_computed_files(content: &Content) {
    if let Some(rule) = content.computed.first() {
        eprintln!(
            "warning: computed files are signed without their content, such as {} by {}",
            rule.path, rule.source
        );
    }
}

/// The statement on an image that is signed now.
fn statement_on(content: &Content, expires_in: Option<Duration>) -> Result<Statement, Failure> {
    let now = u64::try_from(jiff::Timestamp::now().as_second())
        .map_err(|_| Failure::of_text("the clock shows a time before 1970: set it first"))?;
    let expires = expires_in.map(|duration| now.saturating_add(duration.as_secs()));
    if expires.is_some_and(|expires| expires <= now) {
        return Err(Failure::of_text("the signature would expire at once").misuse());
    }
    Ok(Statement { image: content.name.clone(), digest: content.digest(), signed: now, expires })
}

/// What is printed with `--format json`.
#[derive(Debug, Serialize)]
struct SignatureRecord {
    key: Option<String>,
    statement: String,
}

/// Signs an image, or changes its signatures otherwise.
pub async fn sign(context: &Context, args: SignArgs) -> VerbResult {
    let failed = |error| Failure::of_image_call(&error, &args.name);
    let key = args.key.as_deref();
    let key = key.map(|path| open_key(path, args.passphrase_file.as_deref())).transpose()?;
    let content = get_image(&context.client, &args.name).await.map_err(failed)?.content;
    let digest = content.digest();
    if content.name != args.name {
        return Err(Failure::of_text(format!("the server sent {} instead", content.name)));
    }
    if args.digest.is_some_and(|wanted| wanted != digest) {
        let text = format!("the image server says that {} has the digest {digest}", args.name);
        return Err(
            Failure::of_text(text).hint("nothing was signed: find out why the digests differ")
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
        done.push(format!("Took the signature by {key} from {}.", args.name));
    }
    let remove = args.remove.clone();
    let request = ChangeSignaturesRequest { name: args.name.clone(), add, remove };
    let reply = context.client.call::<ChangeSignatures>(&request).await.map_err(failed)?;
    // Not before the server has it.
    done.iter().for_each(|line| eprintln!("{line}"));
    if context.format == Format::Json {
        let signature_record: Vec<SignatureRecord> =
            reply.signatures.iter().map(signature_record).collect();
        print_json(&signature_record)?;
    }
    Ok(Outcome::Done)
}

fn signature_record(signature: &Signature) -> SignatureRecord {
    let key = signature.check().ok().map(|checked| checked.fingerprint());
    SignatureRecord { key, statement: signature.statement.clone() }
}

/// What `show` says of the signatures of an image: which key, when, and until when.
pub(super) fn describe(signature: &Signature, content: &Content) -> String {
    match signature.check_for(&content.name, &content.digest()) {
        Err(error) => format!("not valid: {}", model::report::report(&error)),
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
    let failed = |error: KeyError| Failure::of_text(format!("{}: {error}", path.display()));
    let given =
        passphrase.map(|path| read_text_up_to(path, "passphrase", FILE_BYTES_MAX)).transpose()?;
    let given = given.as_deref().map(|text| text.trim_end_matches(['\r', '\n']));
    match SigningKey::read(&text, given) {
        Err(KeyError::Closed) if io::stdin().is_terminal() => {
            let asked = rpassword::prompt_password(format!("Passphrase of {}: ", path.display()));
            let asked = asked
                .map_err(|error| Failure::of_text(format!("cannot read a passphrase: {error}")))?;
            SigningKey::read(&text, Some(&asked)).map_err(failed)
        }
        Err(error @ KeyError::Closed) => Err(failed(error).hint(
            "give the passphrase with --passphrase-file, or sign with an agent: `imagetool sign \
             --help` shows how",
        )),
        Err(error @ (KeyError::Format { .. } | KeyError::Kind { .. })) => {
            Err(failed(error).hint("`ssh-keygen -t ed25519 -f FILE` makes one"))
        }
        other => other.map_err(failed),
    }
}

/// Says whether enough trusted keys have signed an image.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool verify-signatures web/8 --trusted-keys /etc/subd/trusted-keys
  imagetool verify-signatures web/8 --trusted-keys keys --signatures-needed 2

The file has a public key on each line, as `ssh-keygen` writes it to a .pub file; `images=\"web/\"`
before it lets the key sign only these. It is judged as on a machine, but for the image that the
machine had before.

Exit codes: 0 enough have signed, 3 too few have, 1 it could not be found out.")]
pub struct VerifySignaturesArgs {
    /// The name of the image.
    pub name: ImageName,
    /// The keys that are trusted.
    #[arg(long, value_name = "FILE")]
    pub trusted_keys: PathBuf,
    /// How many different ones must have signed.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub signatures_needed: u32,
}

/// What is printed with `--format json`.
#[derive(Debug, Serialize)]
struct SignatureReport<'call> {
    name: &'call ImageName,
    enough: bool,
    needed: u32,
    keys: Vec<String>,
    why: Option<String>,
}

/// Verifies the signatures of an image.
pub async fn verify_signatures(context: &Context, args: VerifySignaturesArgs) -> VerbResult {
    let VerifySignaturesArgs { name, trusted_keys, signatures_needed } = args;
    let needed = signatures_needed.max(1);
    let text = read_text_up_to(&trusted_keys, "trusted keys", FILE_BYTES_MAX)?;
    let keys = TrustedKeys::read(&text, needed)
        .map_err(|error| Failure::of_text(format!("{}: {error}", trusted_keys.display())))?;
    let image = get_image(&context.client, &name).await;
    let image = image.map_err(|error| Failure::of_image_call(&error, &name))?;
    let now = u64::try_from(jiff::Timestamp::now().as_second()).unwrap_or_default();
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
    if context.format == Format::Json {
        print_json(&SignatureReport { name: &name, enough: result.is_ok(), needed, keys, why })?;
    }
    Ok(if result.is_ok() { Outcome::Done } else { Outcome::Different })
}
