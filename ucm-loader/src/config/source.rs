//! Puts a configuration together: defaults, file, environment, flags.

use std::fmt;
use std::fs;
use std::path::Path;

use figment::Figment;
use figment::providers::{Env, Format, Serialized, Toml};
use serde::Serialize;
use serde::de::{Deserializer, Visitor};
use serde_json::Value;

use super::{ConfigError, LoaderConfig};

/// What an environment variable's name begins with.
const PREFIX: &str = "UCM_";
/// Variables of that prefix that are not keys.
const OTHER_VARIABLES: [&str; 3] = ["log", "config", "crash"];

impl LoaderConfig {
    /// Reads the sources. `file` must exist if it is given. `flags` is any
    /// structure with some of the keys as fields; those that are `None` are
    /// left to the other sources.
    ///
    /// A key nobody knows is an error in a file or a flag. A `UCM_*` variable
    /// nobody knows may be another program's, so it is only reported.
    pub fn load(file: Option<&Path>, flags: &impl Serialize) -> Result<Self, ConfigError> {
        let known = known_keys()?;
        let mut sources = Figment::from(Serialized::defaults(Self::default()));
        if let Some(path) = file {
            // Read here: figment takes a missing file for an empty one.
            let text = fs::read_to_string(path).map_err(|error| {
                let errno = error.raw_os_error().unwrap_or(libc::EILSEQ);
                ConfigError::File { path: path.to_owned(), errno }
            })?;
            sources = sources.merge(Toml::string(&text));
        }
        let unknown = |key: &str| {
            let key = key.to_ascii_lowercase();
            let ours = known.contains(&key) || OTHER_VARIABLES.contains(&key.as_str());
            (!ours && !key.starts_with("test_")).then_some(key)
        };
        for (name, _) in std::env::vars_os() {
            let key = name.to_str().and_then(|name| name.strip_prefix(PREFIX)).and_then(unknown);
            if let Some(key) = key {
                tracing::warn!(variable = %format!("{PREFIX}{}", key.to_uppercase()), "not a configuration key; ignored");
            }
        }
        let names: Vec<&str> = known.iter().map(String::as_str).collect();
        sources = sources.merge(Env::prefixed(PREFIX).only(&names));
        let given = given(flags)?;
        Ok(sources.merge(Serialized::defaults(given)).extract()?)
    }
}

/// The names of all fields.
fn known_keys() -> Result<Vec<String>, ConfigError> {
    match json(&LoaderConfig::default())? {
        Value::Object(fields) => Ok(fields.into_iter().map(|(key, _)| key).collect()),
        _ => Ok(Vec::new()),
    }
}

/// The flags without those that are not set: a null would override.
fn given(flags: &impl Serialize) -> Result<Value, ConfigError> {
    let mut value = json(flags)?;
    if let Value::Object(fields) = &mut value {
        fields.retain(|_, value| !value.is_null());
    } else if value.is_null() {
        value = Value::Object(serde_json::Map::new());
    }
    Ok(value)
}

fn json(value: &impl Serialize) -> Result<Value, ConfigError> {
    serde_json::to_value(value)
        .map_err(|error| ConfigError::Source(Box::new(figment::Error::from(error.to_string()))))
}

/// Text, even where a source takes it for something else: `UCM_SEGMENT_ID=17`
/// is a name, though an environment variable of digits is read as a number.
pub(super) fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    struct Text;
    impl Visitor<'_> for Text {
        type Value = String;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a text")
        }

        fn visit_str<E>(self, value: &str) -> Result<String, E> {
            Ok(value.to_owned())
        }

        fn visit_bool<E>(self, value: bool) -> Result<String, E> {
            Ok(value.to_string())
        }

        fn visit_i64<E>(self, value: i64) -> Result<String, E> {
            Ok(value.to_string())
        }

        fn visit_u64<E>(self, value: u64) -> Result<String, E> {
            Ok(value.to_string())
        }
    }
    deserializer.deserialize_any(Text)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::backend::file::store::Fsync;

    #[derive(Serialize, Default)]
    struct Flags {
        capacity_bytes: Option<u64>,
        rank: Option<u32>,
        claim_window: Option<u32>,
    }

    /// `Jail` sets variables for one closure at a time.
    #[allow(clippy::result_large_err)]
    fn in_jail(run: impl FnOnce(&mut figment::Jail)) {
        figment::Jail::expect_with(|jail| {
            run(jail);
            Ok(())
        });
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn flags_win_over_the_environment_which_wins_over_the_file() {
        in_jail(|jail| {
            let file = file("capacity_bytes = 1\nrank = 1\nbackend_workers = 1\nfsync = \"full\"");
            jail.set_env("UCM_CAPACITY_BYTES", "2");
            jail.set_env("UCM_RANK", "2");
            jail.set_env("UCM_LOG", "debug");
            let flags = Flags { capacity_bytes: Some(3), ..Flags::default() };
            let config = LoaderConfig::load(Some(file.path()), &flags).unwrap();
            assert_eq!((config.capacity_bytes, config.rank, config.backend_workers), (3, 2, 1));
            assert_eq!((config.fsync, config.stream_number), (Fsync::Full, 4));
        });
    }

    #[test]
    fn without_sources_everything_is_the_default() {
        in_jail(|_| {
            let config = LoaderConfig::load(None, &Flags::default()).unwrap();
            assert_eq!(config, LoaderConfig::default());
            assert_eq!(LoaderConfig::load(None, &()).unwrap(), config);
        });
    }

    #[test]
    fn a_name_of_digits_from_the_environment_stays_a_name() {
        in_jail(|jail| {
            jail.set_env("UCM_SEGMENT_ID", "17");
            let config = LoaderConfig::load(None, &()).unwrap();
            assert_eq!(config.segment_id, "17");
        });
    }

    #[test]
    fn a_missing_file_is_an_error_and_not_an_empty_file() {
        in_jail(|_| {
            let error = LoaderConfig::load(Some(Path::new("/nowhere/ucm.toml")), &()).unwrap_err();
            assert!(matches!(error, ConfigError::File { errno: libc::ENOENT, .. }), "{error}");
        });
    }

    #[test]
    fn an_unknown_key_and_a_wrong_type_are_named() {
        in_jail(|jail| {
            let file = file("capcity_bytes = 1");
            let error = LoaderConfig::load(Some(file.path()), &()).unwrap_err().to_string();
            assert!(error.contains("capcity_bytes"), "{error}");
            jail.set_env("UCM_RANK", "first");
            let error = LoaderConfig::load(None, &()).unwrap_err().to_string();
            assert!(error.contains("first") && error.to_lowercase().contains("rank"), "{error}");
            assert!(error.contains("UCM_"), "{error}");
        });
    }
}
