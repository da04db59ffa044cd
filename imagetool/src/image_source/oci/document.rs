//! The JSON documents of images, with the fields that are used here.
//!
//! Field names are those of the OCI image specification, which took them from Docker's formats.
//! Unknown fields are ignored, as the specification demands.
// tidy: core

use std::collections::BTreeMap;

use serde::Deserialize;

use super::platform::Platform;
use crate::archive::blob_digest::BlobDigest;

/// The annotation with the name by which a layout knows an image.
const NAME: &str = "org.opencontainers.image.ref.name";

/// The annotation with the whole name of an image, as containerd and Docker write it.
const WHOLE_NAME: &str = "io.containerd.image.name";

/// The annotation of documents that only describe another image, such as how it was built.
const DESCRIBES: &str = "vnd.docker.reference.type";

/// Names a blob.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What the blob is.
    #[serde(default)]
    pub media_type: String,
    pub digest: BlobDigest,
    /// Its length, in bytes.
    pub size: u64,
    /// For which machines an image is.
    #[serde(default)]
    pub platform: Option<Platform>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

/// What a blob is, as its media type says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A list of images.
    Index,
    /// An image.
    Manifest,
    /// What an image is besides its layers.
    Config,
    /// A layer: a tar archive, perhaps compressed.
    Layer,
    /// An unknown type.
    Other,
}

impl Descriptor {
    /// Returns what the blob is.
    pub fn kind(&self) -> Kind {
        match self.media_type.as_str() {
            "application/vnd.oci.image.index.v1+json"
            | "application/vnd.docker.distribution.manifest.list.v2+json" => Kind::Index,
            "application/vnd.oci.image.manifest.v1+json"
            | "application/vnd.docker.distribution.manifest.v2+json" => Kind::Manifest,
            "application/vnd.oci.image.config.v1+json"
            | "application/vnd.docker.container.image.v1+json" => Kind::Config,
            other if is_layer(other) => Kind::Layer,
            _ => Kind::Other,
        }
    }

    /// Returns the name of the image, if it has one.
    pub fn name(&self) -> Option<&str> {
        let annotations = self.annotations.as_ref()?;
        annotations.get(NAME).or_else(|| annotations.get(WHOLE_NAME)).map(String::as_str)
    }

    /// Returns true if it only describes another image.
    pub fn is_description(&self) -> bool {
        let marked = self.annotations.as_ref().is_some_and(|all| all.contains_key(DESCRIBES));
        marked || self.platform.as_ref().is_some_and(|platform| platform.os == "unknown")
    }
}

fn is_layer(media_type: &str) -> bool {
    let oci = media_type
        .strip_prefix("application/vnd.oci.image.layer.")
        .map(|rest| rest.strip_prefix("nondistributable.").unwrap_or(rest))
        .and_then(|rest| rest.strip_prefix("v1.tar"));
    if let Some(compression) = oci {
        return matches!(compression, "" | "+gzip" | "+zstd");
    }
    let docker = media_type.strip_prefix("application/vnd.docker.image.rootfs.");
    docker
        .map(|rest| rest.strip_prefix("foreign.").unwrap_or(rest))
        .and_then(|rest| rest.strip_prefix("diff.tar"))
        .is_some_and(|compression| matches!(compression, "" | ".gzip" | ".zstd"))
}

/// The file `oci-layout`, by which a layout is known.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Layout {
    pub image_layout_version: String,
}

/// A list of images.
#[derive(Clone, Debug, Deserialize)]
pub struct Index {
    manifests: Option<Vec<Descriptor>>,
}

impl Index {
    /// Returns what it lists.
    pub fn manifests(self) -> Vec<Descriptor> {
        self.manifests.unwrap_or_default()
    }
}

/// An image.
#[derive(Clone, Debug, Deserialize)]
pub struct Manifest {
    /// What the image is besides its layers.
    pub config: Descriptor,
    layers: Option<Vec<Descriptor>>,
}

impl Manifest {
    /// Returns the layers, the lowest first.
    pub fn layers(self) -> Vec<Descriptor> {
        self.layers.unwrap_or_default()
    }
}

/// What an image is besides its layers.
#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    /// For which machines it is.
    #[serde(flatten)]
    pub platform: Platform,
    rootfs: RootFs,
}

#[derive(Clone, Debug, Deserialize)]
struct RootFs {
    diff_ids: Option<Vec<BlobDigest>>,
}

impl Config {
    /// Returns the digests of what the layers expand to, the lowest first.
    pub fn expanded_layers(&self) -> &[BlobDigest] {
        self.rootfs.diff_ids.as_deref().unwrap_or_default()
    }
}

/// One image of an archive by `docker save`: names are those of the members of the archive.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct SavedImage {
    /// The member with the [`Config`].
    pub config: String,
    repo_tags: Option<Vec<String>>,
    layers: Option<Vec<String>>,
}

impl SavedImage {
    /// Returns the names of the image, such as `debian:12`.
    pub fn names(&self) -> &[String] {
        self.repo_tags.as_deref().unwrap_or_default()
    }

    /// Returns the members with the layers, the lowest first.
    pub fn layers(&self) -> &[String] {
        self.layers.as_deref().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_types_of_oci_and_of_docker_are_known() {
        let table = [
            ("application/vnd.oci.image.index.v1+json", Kind::Index),
            ("application/vnd.docker.distribution.manifest.list.v2+json", Kind::Index),
            ("application/vnd.oci.image.manifest.v1+json", Kind::Manifest),
            ("application/vnd.docker.distribution.manifest.v2+json", Kind::Manifest),
            ("application/vnd.oci.image.config.v1+json", Kind::Config),
            ("application/vnd.docker.container.image.v1+json", Kind::Config),
            ("application/vnd.oci.image.layer.v1.tar", Kind::Layer),
            ("application/vnd.oci.image.layer.v1.tar+gzip", Kind::Layer),
            ("application/vnd.oci.image.layer.v1.tar+zstd", Kind::Layer),
            ("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip", Kind::Layer),
            ("application/vnd.docker.image.rootfs.diff.tar.gzip", Kind::Layer),
            ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", Kind::Layer),
            ("application/vnd.oci.image.layer.v1.tar+encrypted", Kind::Other),
            ("application/vnd.oci.empty.v1+json", Kind::Other),
            ("", Kind::Other),
        ];
        for (media_type, kind) in table {
            let digest = format!("sha256:{}", "0".repeat(64)).try_into().unwrap();
            let media_type = media_type.to_owned();
            let descriptor =
                Descriptor { media_type, digest, size: 0, platform: None, annotations: None };
            assert_eq!(descriptor.kind(), kind, "{descriptor:?}");
        }
    }
}
