//! Opens images of other tools: OCI layouts, archives of them, and archives by `docker save`.
//!
//! Such an image is a JSON document that names layers by their digests, each a tar archive. This
//! module finds the layers and returns them as an [`Archive`], which reads their content.
//!
//! # Invariants
//!
//! * No document and no layer is used before its digest was verified.
//! * A document can refer only to blobs by digest, or to members of the same archive by name: never
//!   to a file elsewhere.
//! * Documents are limited in length, number and depth.

mod blobs;
mod document;
pub mod platform;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read as _};
use std::path::Path;

use model::path::TreePath;
use serde::de::DeserializeOwned;

use self::document::{Config, Descriptor, Index, Kind, Layout, Manifest, SavedImage};
use self::platform::{Candidate, ChoiceError, ImageSelection, choose};
use crate::archive::blob_digest::{BlobDigest, BlobHasher};
use crate::archive::input::ExpansionLimit;
use crate::archive::input::Section;
use crate::archive::{Archive, ArchiveError, ArchivePart, EntryError, compression, member, spool};
use crate::image_source::oci::blobs::Blobs;
use crate::output::progress::{Meter, Unit};

/// The largest document, in bytes: what registries accept.
pub const DOCUMENT_BYTES_MAX: u64 = 4 << 20;

/// The maximum number of image indexes in one layout.
const INDEXES_MAX: usize = 256;

/// The maximum nesting depth of image indexes.
const DEPTH_MAX: u32 = 8;

/// The most images in one layout.
const IMAGES_MAX: usize = 1_000;

/// The most layers of an image. Docker makes at most 127.
const LAYERS_MAX: usize = 1_000;

/// How much of a layer is read at once, in bytes.
const BUFFER_BYTES: usize = 256 << 10;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OciError {
    #[error("`{name}` is missing")]
    Absent { name: String },
    #[error("`{name}` is not a regular file")]
    NoFile { name: String },
    #[error("cannot read `{name}`")]
    Read { name: String, source: io::Error },
    #[error("`{name}` is longer than {DOCUMENT_BYTES_MAX} bytes, too long for a document")]
    TooLong { name: String },
    #[error("`{name}` is not a valid document")]
    Document { name: String, source: serde_json::Error },
    #[error("`{document}` names `{name}`, which is not a valid member name")]
    Name { document: &'static str, name: String, source: EntryError },
    #[error("{digest} should have {want} bytes, but has {got}")]
    Size { digest: BlobDigest, want: u64, got: u64 },
    #[error("`{name}` should have the digest {want}, but has {got}")]
    Digest { name: String, want: BlobDigest, got: BlobDigest },
    #[error("the layout has the version `{version}`, and only 1.x is known")]
    Version { version: String },
    #[error("it has too many lists of images, or they are nested too deeply")]
    TooMany,
    #[error(transparent)]
    Choice {
        #[from]
        source: ChoiceError,
    },
    #[error("{digest} is not an image of a machine: its {part} has the type `{media_type}`")]
    Type { digest: String, part: &'static str, media_type: String },
    #[error("the image has {layers} layers, but lists the digests of {contents}")]
    Layers { layers: usize, contents: usize },
    #[error("the image has {layers} layers, more than {LAYERS_MAX}")]
    TooManyLayers { layers: usize },
    #[error("cannot expand the archive")]
    Expand { source: ArchiveError },
}

/// Opens the image in the directory `path`; `None` if that is no OCI layout.
pub fn open_directory(
    path: &Path,
    wanted: &ImageSelection,
    meter: &Meter,
) -> Result<Option<Archive>, OciError> {
    let there = |name: &str| path.join(name).is_file();
    if !(there("oci-layout") && there("index.json") && path.join("blobs").is_dir()) {
        return Ok(None);
    }
    open_layout(&Blobs::of_directory(path), wanted, meter).map(Some)
}

/// Opens the image in the archive `section`; `None` if that is an archive of something else, or
/// a bad one.
pub fn open_archive(
    section: &Section,
    wanted: &ImageSelection,
    meter: &Meter,
) -> Result<Option<Archive>, OciError> {
    let mut blobs = Blobs::of_archive(section.open(), section);
    if blobs.is_none() {
        // A compressed archive is expanded only if there is an image in it.
        let expand = || {
            let expansion = ExpansionLimit::default();
            let input = compression::open(expansion.count_packed(section.open()))?;
            Ok::<_, io::Error>(expansion.count_expanded(input))
        };
        let Ok(input) = expand() else { return Ok(None) };
        if Blobs::of_archive(input, section).is_none() {
            return Ok(None);
        }
        let failed = |source| OciError::Expand { source };
        let mut input =
            expand().map_err(|source| failed(ArchiveError::Read { offset: 0, source }))?;
        let expanded = Section::whole(spool(&mut input).map_err(failed)?);
        blobs = Blobs::of_archive(expanded.open(), &expanded);
    }
    match blobs {
        Some(blobs) if blobs.is_layout() => open_layout(&blobs, wanted, meter).map(Some),
        Some(blobs) => open_saved(&blobs, wanted).map(Some),
        None => Ok(None),
    }
}

fn open_layout(blobs: &Blobs, wanted: &ImageSelection, meter: &Meter) -> Result<Archive, OciError> {
    let layout: Layout = document(blobs, "oci-layout")?;
    let version = layout.image_layout_version;
    if !version.starts_with("1.") {
        return Err(OciError::Version { version: model::escape::escape(version.as_bytes()) });
    }
    let mut candidates = Vec::new();
    for (descriptor, name) in images_of(blobs)? {
        let platform = match descriptor.platform.clone() {
            Some(platform) => platform,
            None => image_of(blobs, &descriptor)?.1.platform,
        };
        let names = name.into_iter().collect();
        candidates.push(Candidate { image: Image(descriptor), platform, names });
    }
    let Image(chosen) = choose(candidates, wanted)?;
    let (manifest, config) = image_of(blobs, &chosen)?;
    let layers = manifest.layers();
    let contents = config.expanded_layers();
    check_layers(layers.len(), contents.len())?;
    let total = layers.iter().fold(0_u64, |sum, layer| sum.saturating_add(layer.size));
    meter.start("Verifying layers", Unit::Bytes, Some(total));
    let mut verified: BTreeMap<BlobDigest, Section> = BTreeMap::new();
    let mut parts = Vec::new();
    for (descriptor, content) in layers.iter().zip(contents) {
        if descriptor.kind() != Kind::Layer {
            return Err(wrong_type(&chosen, "layer", descriptor));
        }
        let section = match verified.get(&descriptor.digest) {
            Some(section) => section.clone(),
            None => verified_blob(blobs, descriptor, meter)?,
        };
        verified.insert(descriptor.digest.clone(), section.clone());
        let digest = &descriptor.digest;
        let label = format!("layer {} of {} ({digest})", parts.len() + 1, layers.len());
        parts.push(ArchivePart::of_layer(section, label, content.clone()));
    }
    meter.finish();
    Ok(Archive::of_layers(parts))
}

/// Two images are equal if their documents have the same digest.
struct Image(Descriptor);

impl PartialEq for Image {
    fn eq(&self, other: &Self) -> bool {
        self.0.digest == other.0.digest
    }
}

/// Returns all images that the index of a layout refers to, with their names.
fn images_of(blobs: &Blobs) -> Result<Vec<(Descriptor, Option<String>)>, OciError> {
    let mut images = Vec::new();
    // Indexes that are still to be read, so that only one at a time is in memory.
    let mut pending: Vec<(Descriptor, Option<String>, u32)> = Vec::new();
    let mut seen = BTreeSet::new();
    let (mut index, mut of, mut depth): (Index, Option<String>, u32) =
        (document(blobs, "index.json")?, None, 0);
    loop {
        for descriptor in index.manifests() {
            if descriptor.is_description() {
                continue;
            }
            let name = descriptor.name().map(str::to_owned).or_else(|| of.clone());
            match descriptor.kind() {
                Kind::Index => {
                    if !seen.insert((descriptor.digest.clone(), name.clone())) {
                        continue;
                    }
                    if seen.len() > INDEXES_MAX || depth == DEPTH_MAX {
                        return Err(OciError::TooMany);
                    }
                    pending.push((descriptor, name, depth + 1));
                }
                Kind::Manifest => {
                    if images.len() == IMAGES_MAX {
                        return Err(OciError::TooMany);
                    }
                    images.push((descriptor, name));
                }
                Kind::Config | Kind::Layer | Kind::Other => {}
            }
        }
        let Some((next, name, level)) = pending.pop() else { return Ok(images) };
        (index, of, depth) = (verified_document(blobs, &next)?, name, level);
    }
}

fn image_of(blobs: &Blobs, descriptor: &Descriptor) -> Result<(Manifest, Config), OciError> {
    let manifest: Manifest = verified_document(blobs, descriptor)?;
    if manifest.config.kind() != Kind::Config {
        return Err(wrong_type(descriptor, "configuration", &manifest.config));
    }
    let config = verified_document(blobs, &manifest.config)?;
    Ok((manifest, config))
}

fn wrong_type(image: &Descriptor, part: &'static str, odd: &Descriptor) -> OciError {
    let media_type = model::escape::escape(odd.media_type.as_bytes());
    OciError::Type { digest: image.digest.to_string(), part, media_type }
}

fn check_layers(layers: usize, contents: usize) -> Result<(), OciError> {
    if layers > LAYERS_MAX {
        return Err(OciError::TooManyLayers { layers });
    }
    if layers != contents { Err(OciError::Layers { layers, contents }) } else { Ok(()) }
}

/// Opens an image of an archive by `docker save`, as versions before 25 made them.
fn open_saved(blobs: &Blobs, wanted: &ImageSelection) -> Result<Archive, OciError> {
    const DOCUMENT: &str = "manifest.json";
    let path_of = |name: &str| -> Result<TreePath, OciError> {
        member::path_of(name.as_bytes()).map_err(|source| {
            let name = model::escape::escape(name.as_bytes());
            OciError::Name { document: DOCUMENT, name, source }
        })
    };
    let images: Vec<SavedImage> = document(blobs, DOCUMENT)?;
    if images.len() > IMAGES_MAX {
        return Err(OciError::TooMany);
    }
    let config_of = |saved: &SavedImage| -> Result<Config, OciError> {
        let bytes = bytes_of(blobs, &path_of(&saved.config)?)?;
        if let Some(want) = digest_in(&saved.config) {
            verify(&saved.config, &want, BlobDigest::of(want.algorithm(), &bytes))?;
        }
        parse(&saved.config, &bytes)
    };
    let mut candidates = Vec::new();
    for (image, saved) in images.iter().enumerate() {
        let platform = config_of(saved)?.platform;
        candidates.push(Candidate { image, platform, names: saved.names().to_vec() });
    }
    let chosen = &images[choose(candidates, wanted)?];
    let config = config_of(chosen)?;
    let (layers, contents) = (chosen.layers(), config.expanded_layers());
    check_layers(layers.len(), contents.len())?;
    let mut parts = Vec::new();
    for (name, content) in layers.iter().zip(contents) {
        let section = blobs.section(&path_of(name)?)?;
        let escaped = model::escape::escape(name.as_bytes());
        let label = format!("layer {} of {} (`{escaped}`)", parts.len() + 1, layers.len());
        parts.push(ArchivePart::of_layer(section, label, content.clone()));
    }
    Ok(Archive::of_layers(parts))
}

/// Returns the digest in a name such as `<64 hex>.json` or `blobs/sha256/<64 hex>`.
fn digest_in(name: &str) -> Option<BlobDigest> {
    let last = name.rsplit('/').next()?;
    let last = last.strip_suffix(".json").unwrap_or(last);
    let hex = last.strip_prefix("sha256:").unwrap_or(last);
    BlobDigest::try_from(format!("sha256:{hex}")).ok()
}

fn blob_path(digest: &BlobDigest) -> TreePath {
    TreePath::new(format!("/blobs/{}/{}", digest.algorithm().name(), digest.hex()))
        .expect("a digest has no slash and no dot")
}

/// Reads a document whose digest is not known.
fn document<T: DeserializeOwned>(blobs: &Blobs, name: &'static str) -> Result<T, OciError> {
    let path = TreePath::new(format!("/{name}")).expect("the constants are names");
    parse(name, &bytes_of(blobs, &path)?)
}

fn verified_document<T: DeserializeOwned>(
    blobs: &Blobs,
    descriptor: &Descriptor,
) -> Result<T, OciError> {
    let digest = &descriptor.digest;
    let bytes = bytes_of(blobs, &blob_path(digest))?;
    let name = digest.to_string();
    verify(&name, digest, BlobDigest::of(digest.algorithm(), &bytes))?;
    check_size(descriptor, bytes.len() as u64)?;
    parse(&name, &bytes)
}

fn bytes_of(blobs: &Blobs, path: &TreePath) -> Result<Vec<u8>, OciError> {
    let name = || model::escape::escape(path.relative());
    let mut bytes = Vec::new();
    let mut input = blobs.section(path)?.open().take(DOCUMENT_BYTES_MAX + 1);
    input.read_to_end(&mut bytes).map_err(|source| OciError::Read { name: name(), source })?;
    if bytes.len() as u64 > DOCUMENT_BYTES_MAX {
        return Err(OciError::TooLong { name: name() });
    }
    Ok(bytes)
}

fn parse<T: DeserializeOwned>(name: &str, bytes: &[u8]) -> Result<T, OciError> {
    serde_json::from_slice(bytes).map_err(|source| {
        let name = model::escape::escape(name.as_bytes());
        OciError::Document { name, source }
    })
}

/// Opens the blob that `descriptor` names, and verifies its size and digest.
fn verified_blob(
    blobs: &Blobs,
    descriptor: &Descriptor,
    meter: &Meter,
) -> Result<Section, OciError> {
    let path = blob_path(&descriptor.digest);
    let section = blobs.section(&path)?;
    let mut input = section.open().take(descriptor.size.saturating_add(1));
    let mut hasher = BlobHasher::new(descriptor.digest.algorithm());
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut size = 0;
    loop {
        let read = match input.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(source) => {
                let name = model::escape::escape(path.relative());
                return Err(OciError::Read { name, source });
            }
        };
        hasher.update(&buffer[..read]);
        size += read as u64;
        meter.add(read as u64);
    }
    check_size(descriptor, size)?;
    verify(&descriptor.digest.to_string(), &descriptor.digest, hasher.finish())?;
    Ok(section)
}

fn check_size(descriptor: &Descriptor, got: u64) -> Result<(), OciError> {
    let Descriptor { digest, size: want, .. } = descriptor;
    if got == *want {
        return Ok(());
    }
    Err(OciError::Size { digest: digest.clone(), want: *want, got })
}

fn verify(name: &str, want: &BlobDigest, got: BlobDigest) -> Result<(), OciError> {
    if got == *want {
        return Ok(());
    }
    let name = model::escape::escape(name.as_bytes());
    Err(OciError::Digest { name, want: want.clone(), got })
}
