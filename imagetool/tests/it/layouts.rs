//! Makes OCI layouts piece by piece, good ones and bad ones.

use std::fs;
use std::path::{Path, PathBuf};

use imagetool::archive::blob_digest::{BlobAlgorithm, BlobDigest};
use serde_json::{Value, json};

pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// A layout that is being made.
pub struct Layout {
    directory: PathBuf,
}

pub fn sha256(bytes: &[u8]) -> BlobDigest {
    BlobDigest::of(BlobAlgorithm::Sha256, bytes)
}

impl Layout {
    pub fn new(directory: &Path) -> Self {
        fs::create_dir_all(directory.join("blobs/sha256")).unwrap();
        fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion": "1.0.0"}"#).unwrap();
        Self { directory: directory.to_owned() }
    }

    pub fn path(&self, digest: &BlobDigest) -> PathBuf {
        self.directory.join("blobs/sha256").join(digest.hex())
    }

    /// Adds a blob, and gives what names it.
    pub fn blob(&self, media_type: &str, bytes: &[u8]) -> Value {
        let digest = sha256(bytes);
        fs::write(self.path(&digest), bytes).unwrap();
        json!({"mediaType": media_type, "digest": digest.to_string(), "size": bytes.len()})
    }

    pub fn document(&self, media_type: &str, document: &Value) -> Value {
        self.blob(media_type, document.to_string().as_bytes())
    }

    /// Adds an image of `layers`, and gives what names it.
    pub fn image(&self, architecture: &str, layers: &[&[u8]]) -> Value {
        let digests: Vec<String> = layers.iter().map(|layer| sha256(layer).to_string()).collect();
        let config = json!({
            "os": "linux", "architecture": architecture,
            "rootfs": {"type": "layers", "diff_ids": digests},
        });
        let config = self.document(CONFIG, &config);
        let layers: Vec<Value> = layers.iter().map(|layer| self.blob(LAYER, layer)).collect();
        self.manifest(&config, &layers)
    }

    pub fn manifest(&self, config: &Value, layers: &[Value]) -> Value {
        let manifest = json!({"schemaVersion": 2, "config": config, "layers": layers});
        self.document(MANIFEST, &manifest)
    }

    pub fn list(&self, images: &[Value]) -> Value {
        self.document(INDEX, &json!({"schemaVersion": 2, "manifests": images}))
    }

    pub fn index(&self, images: &[Value]) {
        let index = json!({"schemaVersion": 2, "manifests": images});
        fs::write(self.directory.join("index.json"), index.to_string()).unwrap();
    }
}

/// `image` with the name by which a layout knows it.
pub fn named(mut image: Value, name: &str) -> Value {
    image["annotations"] = json!({"org.opencontainers.image.ref.name": name});
    image
}

/// `image` for machines with that architecture.
pub fn platform(mut image: Value, os: &str, architecture: &str) -> Value {
    image["platform"] = json!({"os": os, "architecture": architecture});
    image
}
