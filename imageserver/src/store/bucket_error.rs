//! Why a bucket did not do what it was asked, in few words.

use std::error::Error;

/// The longest of what a bucket said that is shown, in characters.
const SAID_MAX: usize = 300;

/// Why a bucket did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BucketError {
    /// It does not answer, or only that it cannot now.
    #[error("the bucket {bucket} does not answer, or cannot now ({said}): try again later")]
    Unreachable {
        /// Which.
        bucket: String,
        /// What was said.
        said: String,
    },
    /// It does not let this server do that.
    #[error(
        "the bucket {bucket} does not allow it ({said}): check the credentials of this server, and \
         what they may do"
    )]
    Denied {
        /// Which.
        bucket: String,
        /// What was said.
        said: String,
    },
    /// It is full, or its owner may store no more.
    #[error("the bucket {bucket} takes no more ({said}): give it more space, or delete images")]
    Full {
        /// Which.
        bucket: String,
        /// What was said.
        said: String,
    },
    /// It cannot be used for images.
    #[error("the bucket {bucket} cannot be used: {why}")]
    Unfit {
        /// Which.
        bucket: String,
        /// Why.
        why: &'static str,
    },
    /// It said something else.
    #[error("the bucket {bucket} refuses ({said})")]
    Refused {
        /// Which.
        bucket: String,
        /// What was said.
        said: String,
    },
}

impl BucketError {
    /// What a failure of the library means, which tells the answer of a bucket in its text only.
    pub(super) fn of(bucket: String, error: &dyn Error) -> Self {
        let (status, said) = said(error);
        let is = |codes: &[&str]| codes.iter().any(|code| said.contains(code));
        match status {
            Some(401 | 403) => Self::Denied { bucket, said },
            Some(507) => Self::Full { bucket, said },
            _ if is(&["QuotaExceeded", "XMinioStorageFull", "EntityTooLarge"]) => {
                Self::Full { bucket, said }
            }
            Some(408 | 429 | 500..) | None => Self::Unreachable { bucket, said },
            Some(_) => Self::Refused { bucket, said },
        }
    }
}

/// The status that a bucket answered, if it did, and what it said or what went wrong.
fn said(error: &dyn Error) -> (Option<u16>, String) {
    let text = error.to_string();
    let Some((_, answer)) = text.split_once("status code: ") else {
        let mut root = error;
        while let Some(source) = root.source() {
            root = source;
        }
        return (None, short(&root.to_string()));
    };
    let (line, body) = answer.split_once(": ").unwrap_or((answer, ""));
    let status = line.split(' ').next().and_then(|status| status.parse().ok());
    let part = |name: &str| {
        let (_, rest) = body.split_once(&format!("<{name}>"))?;
        Some(rest.split_once(&format!("</{name}>"))?.0)
    };
    let said = match (part("Code"), part("Message")) {
        (Some(code), Some(message)) => format!("{line}, {code}: {message}"),
        (Some(code), None) => format!("{line}, {code}"),
        _ => line.to_owned(),
    };
    (status, short(&said))
}

fn short(text: &str) -> String {
    let plain = text.chars().map(|letter| if letter.is_control() { ' ' } else { letter });
    plain.take(SAID_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Said(&'static str);

    #[test]
    fn what_a_bucket_answers_has_a_meaning() {
        let bucket = || "s3://b".to_owned();
        let answer = "Generic S3 error: Error performing PUT http://h/b in 1ms - Server returned \
                      non-2xx status code: 403 Forbidden: <?xml?><Error><Code>AccessDenied</Code>\
                      <Message>no\n</Message></Error>";
        let said = "403 Forbidden, AccessDenied: no ".to_owned();
        let expected = BucketError::Denied { bucket: bucket(), said };
        assert_eq!(BucketError::of(bucket(), &Said(answer)), expected);
        let of = |text| match BucketError::of(bucket(), &Said(text)) {
            BucketError::Unreachable { said, .. } => ("unreachable", said),
            BucketError::Denied { said, .. } => ("denied", said),
            BucketError::Full { said, .. } => ("full", said),
            BucketError::Refused { said, .. } => ("refused", said),
            BucketError::Unfit { why, .. } => ("unfit", why.to_owned()),
        };
        #[rustfmt::skip]
        let table = [
            ("status code: 503 Service Unavailable: ",   "unreachable", "503 Service Unavailable"),
            ("status code: 507 Insufficient Storage: x", "full",        "507 Insufficient Storage"),
            ("status code: 404 Not Found: <Code>NoSuchBucket</Code>", "refused",
             "404 Not Found, NoSuchBucket"),
            ("connection refused",                       "unreachable", "connection refused"),
        ];
        for (text, kind, said) in table {
            assert_eq!(of(text), (kind, said.to_owned()));
        }
    }
}
