//! Which images a replica follows, by patterns of their names.
//!
//! The patterns are those of `imagetool list --glob`: `*` matches anything but a slash, `**`
//! slashes too, `?` one character, `[ab]` one of these, `{a,b}` either.
// tidy: core

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use model::image::ImageName;

/// A text that is no pattern.
#[derive(Debug, thiserror::Error)]
#[error("`{pattern}` is no pattern of image names")]
pub struct PatternError {
    pattern: String,
    #[source]
    source: globset::Error,
}

/// The names that are followed.
#[derive(Clone, Debug, Default)]
pub struct Patterns {
    include: Option<GlobSet>,
    exclude: GlobSet,
}

impl Patterns {
    /// Names of which one of `include` matches, or any if there are none, and none of `exclude`.
    ///
    /// # Errors
    ///
    /// [`PatternError`].
    pub fn new(include: &[String], exclude: &[String]) -> Result<Self, PatternError> {
        let include = if include.is_empty() { None } else { Some(set(include)?) };
        Ok(Self { include, exclude: set(exclude)? })
    }

    /// True if the image of that name is followed.
    #[must_use]
    pub fn name(&self, name: &ImageName) -> bool {
        let name = name.as_str();
        self.include.as_ref().is_none_or(|include| include.is_match(name))
            && !self.exclude.is_match(name)
    }
}

fn set(patterns: &[String]) -> Result<GlobSet, PatternError> {
    let mut globs = GlobSetBuilder::new();
    for pattern in patterns {
        // Names have no leading slash.
        let pattern_of = pattern.strip_prefix('/').unwrap_or(pattern);
        let glob = GlobBuilder::new(pattern_of).literal_separator(true).build();
        globs.add(glob.map_err(|source| PatternError { pattern: pattern.clone(), source })?);
    }
    let all = || patterns.join(", ");
    globs.build().map_err(|source| PatternError { pattern: all(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_followed_that_are_included_and_not_excluded() {
        #[rustfmt::skip]
        let table: [(&[&str], &[&str], &str, bool); 13] = [
            (&[],                 &[],               "base/1",      true),
            (&["base/*"],         &[],               "base/1",      true),
            (&["base/*"],         &[],               "base/a/1",    false),
            (&["base/**"],        &[],               "base/a/1",    true),
            (&["**"],             &[],               "base/a/1",    true),
            (&["/base/*"],        &[],               "base/1",      true),
            (&["base/*"],         &[],               "web/base/1",  false),
            (&["base/*", "web/*"], &[],              "web/1",       true),
            (&[],                 &["test/*"],       "test/1",      false),
            (&[],                 &["test/*"],       "base/1",      true),
            (&["base/*"],         &["**/*-debug"],   "base/1-debug", false),
            (&["base/*"],         &["**/*-debug"],   "base/1",      true),
            (&["{base,web}/[0-9]"], &[],             "web/7",       true),
        ];
        for (include, exclude, name, expected) in table {
            let texts = |texts: &[&str]| texts.iter().map(|text| text.to_string()).collect();
            let (include, exclude): (Vec<String>, Vec<String>) = (texts(include), texts(exclude));
            let patterns = Patterns::new(&include, &exclude).unwrap();
            let name = ImageName::new(name).unwrap();
            assert_eq!(patterns.name(&name), expected, "{name} {include:?} {exclude:?}");
        }
        let error = Patterns::new(&["base/[".to_owned()], &[]).unwrap_err();
        assert_eq!(error.to_string(), "`base/[` is no pattern of image names");
    }
}
