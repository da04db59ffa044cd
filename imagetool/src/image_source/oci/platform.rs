//! The platform of an image, and the selection of one of several images.
// tidy: core

use std::collections::BTreeSet;
use std::fmt;

use serde::Deserialize;

/// An operating system and an architecture, with the names that Go has for them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub struct Platform {
    /// The operating system, such as `linux`.
    #[serde(default)]
    pub os: String,
    /// The architecture, such as `amd64`.
    #[serde(default)]
    pub architecture: String,
    /// Which kind of the architecture, such as `v7` of `arm`.
    #[serde(default)]
    pub variant: Option<String>,
}

/// A text that is no platform.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid platform `{text}`: expected OS/ARCHITECTURE, such as linux/amd64 or linux/arm/v7")]
pub struct PlatformError {
    text: String,
}

impl Platform {
    /// Returns the platform of machines with Linux and the architecture that Rust calls `name`.
    pub fn of_architecture(name: &str) -> Self {
        let architecture = match name {
            "x86_64" => "amd64",
            "x86" => "386",
            "aarch64" => "arm64",
            "powerpc64" => "ppc64le",
            "loongarch64" => "loong64",
            same => same,
        };
        Self { os: "linux".to_owned(), architecture: architecture.to_owned(), variant: None }
    }

    /// Returns true if an image for `self` runs on the machines of `want`. Variants are compared
    /// only if both have one.
    pub fn is_for(&self, want: &Self) -> bool {
        // Each 64-bit ARM is a v8, and some images say so.
        let variant = |platform: &Self| match (&*platform.architecture, &platform.variant) {
            ("arm64", Some(variant)) if variant == "v8" => None,
            (_, variant) => variant.clone().filter(|variant| !variant.is_empty()),
        };
        let (have, wanted) = (variant(self), variant(want));
        self.os == want.os
            && self.architecture == want.architecture
            && (have == wanted || have.is_none() || wanted.is_none())
    }
}

impl std::str::FromStr for Platform {
    type Err = PlatformError;

    fn from_str(text: &str) -> Result<Self, PlatformError> {
        let words: Vec<&str> = text.split('/').collect();
        let (os, architecture, variant) = match words[..] {
            [os, architecture] => (os, architecture, None),
            [os, architecture, variant] if !variant.is_empty() => (os, architecture, Some(variant)),
            _ => ("", "", None),
        };
        if os.is_empty() || architecture.is_empty() {
            return Err(PlatformError { text: text.to_owned() });
        }
        let variant = variant.map(str::to_owned);
        Ok(Self { os: os.to_owned(), architecture: architecture.to_owned(), variant })
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |text: &str| match text {
            "" => "?".to_owned(),
            text => model::escape::escape(text.as_bytes()),
        };
        write!(formatter, "{}/{}", word(&self.os), word(&self.architecture))?;
        match &self.variant {
            Some(variant) if !variant.is_empty() => write!(formatter, "/{}", word(variant)),
            _ => Ok(()),
        }
    }
}

/// Selects one of several images.
#[derive(Clone, Debug)]
pub struct ImageSelection {
    /// The platform that was asked for.
    pub platform: Option<Platform>,
    /// The default if there are several images.
    pub own: Platform,
    /// The name that was asked for.
    pub name: Option<String>,
}

/// An image among several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate<T> {
    pub image: T,
    /// For which machines.
    pub platform: Platform,
    pub names: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChoiceError {
    #[error("it contains no image")]
    None,
    #[error("it contains no image named {want}: there are {there}")]
    Name { want: String, there: String },
    #[error("it contains no image for {want}: there are some for {there}")]
    Platform { want: Platform, there: String },
    #[error("it contains several images for {want}: {there}")]
    Several { want: Platform, there: String },
}

/// Chooses one of `candidates`.
pub fn choose<T: PartialEq>(
    mut candidates: Vec<Candidate<T>>,
    wanted: &ImageSelection,
) -> Result<T, ChoiceError> {
    if let Some(want) = &wanted.name {
        let named = |candidate: &Candidate<T>| candidate.names.contains(want);
        if !candidates.is_empty() && !candidates.iter().any(named) {
            let there = list(candidates.iter().flat_map(|one| {
                let none = one.names.is_empty().then(|| "one without a name".to_owned());
                one.names.iter().map(|name| model::escape::escape(name.as_bytes())).chain(none)
            }));
            return Err(ChoiceError::Name { want: want.clone(), there });
        }
        candidates.retain(named);
    }
    // One image may be listed more than once.
    let mut images: Vec<Candidate<T>> = Vec::new();
    for candidate in candidates {
        match images.iter_mut().find(|known| known.image == candidate.image) {
            Some(known) => known.names.extend(candidate.names),
            None => images.push(candidate),
        }
    }
    if images.is_empty() {
        return Err(ChoiceError::None);
    }
    let want = match &wanted.platform {
        Some(platform) => platform,
        // A single image is taken whatever its architecture, but not of another operating system.
        None if images.len() == 1 && ["", &wanted.own.os].contains(&&*images[0].platform.os) => {
            &images[0].platform.clone()
        }
        None => &wanted.own,
    };
    let all = list(images.iter().map(|image| image.platform.to_string()));
    images.retain(|image| image.platform.is_for(want));
    let described = list(images.iter().map(|image| {
        let names = image.names.join(" or ");
        let names = model::escape::escape(names.as_bytes());
        if names.is_empty() { image.platform.to_string() } else { names }
    }));
    match (images.pop(), images.is_empty()) {
        (None, _) => Err(ChoiceError::Platform { want: want.clone(), there: all }),
        (Some(image), true) => Ok(image.image),
        (Some(_), false) => Err(ChoiceError::Several { want: want.clone(), there: described }),
    }
}

fn list(texts: impl Iterator<Item = String>) -> String {
    texts.collect::<BTreeSet<String>>().into_iter().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn platform(text: &str) -> Platform {
        text.parse().unwrap()
    }

    #[test]
    fn a_platform_is_an_operating_system_and_an_architecture() {
        for text in ["linux/amd64", "linux/arm/v7"] {
            assert_eq!(platform(text).to_string(), text);
        }
        for text in ["", "linux", "linux/", "/amd64", "linux/arm/", "linux/arm/v7/x"] {
            assert!(text.parse::<Platform>().is_err(), "{text}");
        }
        assert_eq!(Platform::of_architecture("x86_64"), platform("linux/amd64"));
        assert_eq!(Platform::of_architecture("riscv64"), platform("linux/riscv64"));
    }

    #[test]
    fn one_image_is_meant_or_it_is_said_which_there_are() {
        let fleet = ["1 linux/amd64", "2 linux/arm64/v8", "3 linux/arm/v6", "4 linux/arm/v7"];
        let tags = ["1 linux/amd64 old", "2 linux/amd64 new", "2 linux/amd64 latest"];
        let arm = ["2 linux/arm64/v8"];
        let none: [&str; 0] = [];
        let windows = ["1 windows/amd64"];
        type Row<'a> = (&'a [&'a str], Option<&'a str>, Option<&'a str>, Result<u32, &'a str>);
        #[rustfmt::skip]
        let table: [Row<'_>; 18] = [
            (&windows, None,                  None,     Err("it contains no image for linux/amd64: there are some for windows/amd64")),
            (&windows, Some("windows/amd64"), None,     Ok(1)),
            (&none,  None,                 None,        Err("it contains no image")),
            (&none,  None,                 Some("x"),   Err("it contains no image")),
            (&arm,   None,                 None,        Ok(2)),
            (&arm,   Some("linux/amd64"),  None,        Err("it contains no image for linux/amd64: there are some for linux/arm64/v8")),
            (&fleet, None,                 None,        Ok(1)),
            (&fleet, Some("linux/arm64"),  None,        Ok(2)),
            (&fleet, Some("linux/arm/v7"), None,        Ok(4)),
            (&fleet, Some("linux/arm"),    None,        Err("it contains several images for linux/arm: linux/arm/v6, linux/arm/v7")),
            (&fleet, Some("windows/amd64"), None,       Err("it contains no image for windows/amd64: there are some for linux/amd64, linux/arm/v6, linux/arm/v7, linux/arm64/v8")),
            (&fleet, None,                 Some("x"),   Err("it contains no image named x: there are one without a name")),
            (&tags,  None,                 None,        Err("it contains several images for linux/amd64: new or latest, old")),
            (&tags,  None,                 Some("old"), Ok(1)),
            (&tags,  None,                 Some("new"), Ok(2)),
            (&tags,  None,                 Some("latest"), Ok(2)),
            (&tags,  None,                 Some("x"),   Err("it contains no image named x: there are latest, new, old")),
            (&tags,  Some("linux/arm64"),  Some("new"), Err("it contains no image for linux/arm64: there are some for linux/amd64")),
        ];
        for (images, want, name, expected) in table {
            let candidates = images.iter().map(|text| {
                let mut words = text.split(' ');
                let image: u32 = words.next().unwrap().parse().unwrap();
                let platform = platform(words.next().unwrap());
                Candidate { image, platform, names: words.map(str::to_owned).collect() }
            });
            let wanted = ImageSelection {
                platform: want.map(platform),
                own: platform("linux/amd64"),
                name: name.map(str::to_owned),
            };
            let got = choose(candidates.collect(), &wanted).map_err(|error| error.to_string());
            assert_eq!(got, expected.map_err(str::to_owned), "{images:?} {want:?} {name:?}");
        }
    }
}
